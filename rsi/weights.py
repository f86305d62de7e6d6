"""Hugging Face folders: config.json, safetensors and tokenizer files, in and out.

An actor's folder is one that transformers loads as ``Qwen3ForCausalLM``. A critic's folder has the same trunk
and ``value_head.weight`` / ``value_head.bias`` in float32.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rsi.chat import END, PAD, SPECIAL_TOKENS
from rsi.model import Critic, ModelConfig, Transformer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class WeightsError(ValueError):
    """A model folder that cannot be read as what was asked for."""


def save_model(folder: Path, model: Transformer | Critic, tokenizer: Tokenizer) -> None:
    """Write the model's folder, replacing an older one as a whole: no reader sees half of it."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(f".{folder.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": str(model.model.norm.weight.dtype).removeprefix("torch.")}
    if isinstance(model, Critic):
        config["architectures"] = ["Critic"]
    _write_json(partial / "config.json", config)
    _write_tokenizer(partial, tokenizer)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def load_actor(folder: Path) -> Transformer:
    """The actor of a folder, in float32 whatever the file's type (master weights).

    Raises WeightsError, naming the folder and what is wrong, for another architecture or other tensors.
    """
    actor = Transformer(_read_config(Path(folder)))
    _fill(actor, Path(folder))
    return actor


def load_critic(folder: Path) -> Critic:
    """The critic of a folder, in float32. Raises WeightsError when the folder has no value head."""
    critic = Critic(_read_config(Path(folder)))
    _fill(critic, Path(folder))
    return critic


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's ``tokenizer.json``."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing: give a folder that holds a model and its tokenizer")
    return Tokenizer.from_file(str(path))


def sha256(folder: Path) -> str:
    """Hex digest over names, types, shapes and bytes of the folder's tensors, sorted by name.

    It does not depend on how the tensors are spread over files, nor on the files beside them.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_read_tensors(Path(folder)).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing: give a Hugging Face model folder")
    try:
        values = json.loads(path.read_text())
        return ModelConfig.from_dict(values)
    except (json.JSONDecodeError, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"{path} is missing: give a folder with safetensors weights")
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})
        except SafetensorError as error:
            raise WeightsError(f"{path}: {error}: the file is damaged, copy it again") from error
    return tensors


def _fill(model: nn.Module, folder: Path) -> None:
    found, wanted = _read_tensors(folder), model.state_dict()
    if isinstance(model, Critic) and not any(name.startswith("value_head.") for name in found):
        raise WeightsError(f"{folder}: no value_head tensors: this is an actor, a critic's folder is needed")
    if isinstance(model, Transformer) and "value_head.weight" in found:
        raise WeightsError(f"{folder}: has a value_head: this is a critic, an actor's folder is needed")
    if isinstance(model, Transformer) and model.config.tie_word_embeddings:
        head = found.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, found["model.embed_tokens.weight"]):
            raise WeightsError(f"{folder}: config ties the embeddings, but lm_head.weight differs from them")
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is not part of the model" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the config says {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name].shape != found[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(f"{folder}: {'; '.join(problems[:5])}{more}")
    model.load_state_dict(found)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    stop = [tokenizer.token_to_id(token) for token in (END, PAD)]
    special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(token_id): {"content": token, "special": True, "normalized": False}
                for token, token_id in special.items()
            },
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": stop, "pad_token_id": stop[1]})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
