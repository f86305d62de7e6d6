"""`--dry-run`: what would run, and what it would need, without a GPU, a download or a byte written.

Parameters are counted on a model built on the meta device; activations are what one layer of each kind keeps for its
backward pass, caught while it runs on tensors without storage.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rsi.architecture import LINEAR, PUBLISHED, ModelConfig
from rsi.config import Config, UserError, to_record
from rsi.model import Critic, Layer, Mixing, Transformer, rotary
from rsi.stages import missing_before
from rsi.weights import WeightsError, read_config

GIB = 2**30
FLOAT32, ADAM = 4, 8  # bytes a parameter: master weights and gradients each; two moments

SAMPLE_TOKENS = 1024


@dataclass(frozen=True)
class Memory:
    """Bytes of one network on one rank, its parameters sharded over all of them along their first dimension.

    `recomputed` replaces `activations` where every layer keeps its input alone and is run again for its gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    recomputed: int

    @property
    def parts(self) -> dict[str, int]:
        return {name: count for name, count in vars(self).items() if name != "recomputed"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def model_config(config: Config) -> ModelConfig:
    """The model that a run would train: the embedded one, a folder's, or a published one by its name on the hub."""
    name = config.init.removeprefix("hub:")
    if config.init and not config.init.startswith("hub:"):
        try:
            return read_config(Path(config.init))
        except WeightsError as problem:
            raise UserError(f"--init {config.init}: {problem}") from problem
    if name and name not in PUBLISHED:
        raise UserError(f"--init {config.init}: its sizes are not known here; download it and give the folder")
    if name:
        return PUBLISHED[name]
    shape = config.model
    return ModelConfig(
        shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.layers, shape.heads, shape.kv_heads,
        shape.head_dim,
    )  # fmt: skip


def build(model: ModelConfig) -> tuple[Transformer, Critic]:
    """Both networks, without storage."""
    with torch.device("meta"):
        return Transformer(model), Critic(model)


def parameters_by_part(network: nn.Module) -> dict[str, int]:
    """Parameter counts of embedding, attention, DeltaNet, MLP, norms and heads."""
    names = {
        "embed_tokens": "embedding",
        "self_attn": "attention",
        "linear_attn": "DeltaNet",
        "mlp": "MLP",
        "lm_head": "output head",
        "value_head": "value head",
    }
    counts: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        part = next((label for word, label in names.items() if word in name.split(".")), "norms")
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def memory(network: Transformer | Critic, ranks: int, tokens: int) -> Memory:
    """What one rank needs in a training step with micro-batches of `tokens` tokens, float32 master weights, AdamW."""
    config = network.config
    sharded = sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in network.parameters())
    layers = [layer for layer in network.model.layers if isinstance(layer, Layer)]
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    root = sum(p.numel() for p in network.parameters()) - sum(p.numel() for layer in layers for p in layer.parameters())
    # A rank holds the root's parameters whole during the step, and two layers: one at work, one on its way.
    gathered = FLOAT32 * (root + 2 * largest) if ranks > 1 else 0
    # Everything that a layer keeps grows with the tokens (attention scores are not kept): a sample will do.
    sample = min(tokens, SAMPLE_TOKENS)
    kept = {kind: saved_bytes(config, kind, sample) * tokens // sample for kind in set(config.kinds)}
    logits = FLOAT32 * tokens * config.vocab_size if isinstance(network, Transformer) else 0
    activations = sum(kept[kind] for kind in config.kinds)
    recomputed = FLOAT32 * tokens * config.hidden_size * config.num_hidden_layers + max(kept.values())
    return Memory(FLOAT32 * sharded, FLOAT32 * sharded, ADAM * sharded, gathered, activations, logits, recomputed)


def saved_bytes(config: ModelConfig, kind: str, tokens: int) -> int:
    """Bytes that one layer keeps for its backward pass over one sequence of `tokens` tokens, in float32."""
    storages: dict[object, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        held.append(tensor)  # alive, so that no later storage takes its place
        return tensor

    held: list[Tensor] = []
    with FakeTensorMode():
        layer = Layer(config, kind)
        weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        hidden = torch.empty(1, tokens, config.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(hidden, rotary(torch.arange(tokens), config), Mixing())
        return sum(count for storage, count in storages.items() if storage not in weights)


def sampler_bytes(model: ModelConfig, slots: int, max_length: int) -> int:
    """Caches of the embedded sampler: keys and values of every token, or one state a sequence."""
    cached = 2 * model.num_key_value_heads * model.head_dim * max_length
    state = model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    return FLOAT32 * slots * sum(state if kind == LINEAR else cached for kind in model.kinds)


def print_plan(config: Config) -> None:
    """The resolved configuration and what would run; nothing is written."""
    print(json.dumps(to_record(config), indent=1))
    for label, line in lines(config):
        print(f"{label:<13}{line}")


def lines(config: Config) -> Iterator[tuple[str, str]]:
    """The plan, a label and its text a line."""
    done: set[str] = set()
    stages = config.folder / "stages"
    if stages.is_dir():
        done = {path.name.partition("-")[2] for path in stages.iterdir() if not path.name.endswith(".partial")}
    yield "run folder", str(config.folder)
    yield "stages", ", ".join(stage.name for stage in missing_before(config, done)) or "all done"
    model = model_config(config)
    source = config.init or "embedded, pretrained here"
    yield "model", f"{source} ({model.model_type}, {model.num_hidden_layers} layers)"
    actor, critic = build(model)
    networks: dict[str, Transformer | Critic] = {"actor": actor, "critic": critic}
    for name, network in networks.items():
        counts = parameters_by_part(network)
        parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
        yield name, f"{sum(counts.values()):,} parameters: {parts}"
    slots = -(-config.rollout.slots // config.ranks)
    cache = sampler_bytes(model, slots, config.rollout.max_length)
    both = recomputed = cache
    for name, network in networks.items():
        need = memory(network, config.ranks, config.micro_batch_tokens)
        both, recomputed = both + need.total, recomputed + need.total - need.activations + need.recomputed
        parts = ", ".join(f"{part} {count / GIB:.2f}" for part, count in need.parts.items())
        yield f"{name} GiB", f"{need.total / GIB:.2f} a rank of {config.ranks}: {parts}"
    yield "sampler GiB", f"{cache / GIB:.2f} a rank: caches of {slots} slots"
    yield "both GiB", f"{both / GIB:.2f} a rank; {recomputed / GIB:.2f} if each layer's activations are recomputed"
    yield "tasks", f"{config.tasks or f'built-in, {config.train_tasks} to train on a suite'}; "\
        f"{config.evaluate.tasks} a suite to evaluate on"  # fmt: skip
    yield "sandbox", config.sandbox
