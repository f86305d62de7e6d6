"""What a ``config.json`` says about a Qwen model's shape, read and written. Does not import torch.

Three families are supported: ``qwen2`` (2 and 2.5), ``qwen3`` (dense) and ``qwen3_5``, the hybrid that Qwen3.5, 3.6
and 3.8 share. The last comes flat (``qwen3_5_text``) or nested under ``text_config``; both are read, the flat form
is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INITIAL_STD = 0.02

FULL, LINEAR = "full_attention", "linear_attention"
FAMILIES = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
}
"""Family -> what a flat ``config.json`` calls it: model_type, architecture."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DELTA_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen model, under the names of its ``config.json``; `linear_*` are the gated DeltaNet's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 4096
    model_type: str = "qwen3"
    eos_token_id: int | tuple[int, ...] | None = None
    partial_rotary_factor: float = 1.0
    """Share of a head's channels, the first ones, that turn with the position."""
    layer_types: tuple[str, ...] = ()
    """`FULL` or `LINEAR` for every layer; empty: all full attention."""
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type is {self.model_type!r}: only {', '.join(FAMILIES)} are supported")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}: choose sizes that divide"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} × partial_rotary_factor {self.partial_rotary_factor} is odd: "
                "rotary embeddings need an even size"
            )
        if len(self.kinds) != self.num_hidden_layers or not set(self.kinds) <= {FULL, LINEAR}:
            raise ValueError(
                f"layer_types is {self.layer_types!r}: {FULL!r} or {LINEAR!r} "
                f"for each of the {self.num_hidden_layers} layers is supported"
            )
        if LINEAR in self.kinds:
            if self.model_type != "qwen3_5":
                raise ValueError(f"layer_types has {LINEAR!r}, which a {self.model_type} model has not")
            if not self.linear_num_key_heads or self.linear_num_value_heads % self.linear_num_key_heads:
                raise ValueError(
                    f"linear_num_value_heads {self.linear_num_value_heads} is no multiple of "
                    f"linear_num_key_heads {self.linear_num_key_heads}: choose sizes that divide"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """`FULL` or `LINEAR` for every layer."""
        return self.layer_types or (FULL,) * self.num_hidden_layers

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that turn with the position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_bias(self) -> bool:
        """Whether the query, key and value projections add a bias."""
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before they are turned."""
        return self.model_type != "qwen2"

    @property
    def hybrid(self) -> bool:
        """Whether norms multiply by 1 + weight and a sigmoid gate follows the attention (Qwen3.5 and later)."""
        return self.model_type == "qwen3_5"

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        eos = self.eos_token_id
        return () if eos is None else eos if isinstance(eos, tuple) else (eos,)

    @property
    def linear_channels(self) -> int:
        """Channels of query, key and value of a gated DeltaNet layer together: what its convolution runs over."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The config of a parsed ``config.json``, written by this package or by transformers (4 or 5).

        Raises ValueError, naming what was found and what is supported, for another architecture.
        """
        text: Mapping[str, Any] = values.get("text_config") or values
        names = {name: family for family, (name, _) in FAMILIES.items()} | {"qwen3_5": "qwen3_5"}
        found = values.get("model_type")
        family = names.get(str(found))
        if family is None or ("text_config" in values and found != "qwen3_5"):
            raise ValueError(f"model_type is {found!r}: only {', '.join(names)} are supported")
        rope = (text.get("rope_parameters") or {}) | (text.get("rope_scaling") or {})
        _refuse_other_settings(values, text, rope, family)
        sizes = _sizes(text, SIZES)
        # What is missing is what transformers takes.
        heads = text["num_attention_heads"]
        default_share = 0.25 if family == "qwen3_5" else 1.0
        share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", default_share))
        eos = text.get("eos_token_id", values.get("eos_token_id"))
        # Where the two differ transformers heeds the outer one.
        tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        return cls(
            **sizes,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or {"qwen3": 128, "qwen3_5": 256}.get(family, text["hidden_size"] // heads),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e4))),
            tie_word_embeddings=bool(tied),
            max_position_embeddings=text.get("max_position_embeddings", 32768),
            model_type=family,
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            partial_rotary_factor=share,
            layer_types=_layer_types(text, family),
            **(_sizes(text, DELTA_SIZES) if family == "qwen3_5" else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """The values of ``config.json``, readable by transformers 4 (``rope_theta``) and 5 (``rope_parameters``)."""
        model_type, architecture = FAMILIES[self.model_type]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        values = {
            "architectures": [architecture],
            "model_type": model_type,
            **{name: getattr(self, name) for name in SIZES},
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": INITIAL_STD,
            "eos_token_id": list(self.stops) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
        }
        if self.hybrid:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
            half = self.rotary_dim // 2
            # Text alone has one position a token: how the channels are dealt to its three axes changes nothing.
            rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
            values |= {"layer_types": list(self.kinds), **{name: getattr(self, name) for name in DELTA_SIZES}}
        return values


def _refuse_other_settings(
    values: Mapping[str, Any], text: Mapping[str, Any], rope: Mapping[str, Any], family: str
) -> None:
    supported = {
        "hidden_act": (text.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (bool(text.get("attention_bias", family == "qwen2")), (family == "qwen2",)),
        "use_sliding_window": (bool(text.get("use_sliding_window")), (False,)),
        "rope_type": (rope.get("type") or rope.get("rope_type", "default"), ("default",)),
        # Names the activation after the gated DeltaNet's norm; the attention's own gate is always a sigmoid.
        "output_gate_type": (text.get("output_gate_type", "swish"), ("swish", "silu")),
        "attn_output_gate": (text.get("attn_output_gate", True), (True,)),
        "quantization_config": (values.get("quantization_config") or text.get("quantization_config"), (None,)),
    }
    for name, (found, wanted) in supported.items():
        if found not in wanted:
            raise ValueError(f"{name} is {found!r}: only {wanted[0]!r} is supported")


def _layer_types(text: Mapping[str, Any], family: str) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None and family == "qwen3_5":
        interval = text.get("full_attention_interval", 4)
        types = [FULL if layer % interval == interval - 1 else LINEAR for layer in range(text["num_hidden_layers"])]
    return () if set(types or ()) == {FULL} else tuple(types or ())


def _sizes(text: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    missing = [name for name in names if text.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing from the model's config")
    wrong = [f"{name} {text[name]!r}" for name in names if type(text[name]) is not int or text[name] < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in the model's config: must be a whole number from 1 on")
    return {name: text[name] for name in names}


PUBLISHED = {
    "Qwen/Qwen3-0.6B": ModelConfig(
        151936, 1024, 3072, 28, 16, 8, 128, max_position_embeddings=40960, eos_token_id=(151645, 151643)
    ),
    "Qwen/Qwen3-8B": ModelConfig(
        151936, 4096, 12288, 36, 32, 8, 128,
        tie_word_embeddings=False, max_position_embeddings=40960, eos_token_id=(151645, 151643),
    ),
    "Qwen/Qwen3.8-27B": ModelConfig(
        248320, 5120, 17408, 64, 24, 4, 256,
        rope_theta=1e7, tie_word_embeddings=False, max_position_embeddings=262144, model_type="qwen3_5",
        eos_token_id=(248046, 248044), partial_rotary_factor=0.25, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
}  # fmt: skip
"""Checkpoints of the presets, by their name on the hub, so that a plan needs no download."""
