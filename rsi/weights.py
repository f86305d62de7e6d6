"""Hugging Face folders: config.json, safetensors and tokenizer files, in and out.

    python -m rsi.weights gguf FILE OUT               a GGUF file of the llama type as a folder
    python -m rsi.weights export ACTOR OUT ORIGINAL   a trained actor as ORIGINAL would hold it: its names, types,
                                                      shards and files, and its tensors that are not trained here

An actor's folder is one that transformers loads. A critic's folder has the same trunk and ``value_head.weight`` /
``value_head.bias`` in float32. Tensors are read and written one at a time, and of a sharded model only this rank's
part is read.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from rsi import distributed
from rsi.architecture import ModelConfig
from rsi.chat import END, PAD, SPECIAL_TOKENS, Chat
from rsi.config import Config, UserError
from rsi.distributed import Network
from rsi.model import Critic, Transformer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OTHER_TOWERS = ("model.visual.", "mtp.")
"""Tensors of a multimodal checkpoint that its text model does not use."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class WeightsError(UserError):
    """A model folder that cannot be read as what was asked for."""


def save_model(folder: Path, model: Transformer | Critic, tokenizer: Tokenizer | Path) -> None:
    """Write the model's folder, replacing an older one as a whole: no reader sees half of it.

    tokenizer: or a model folder, whose tokenizer files are copied as they are. Every rank of a sharded model must
    call; the first one writes.
    """
    kind = "Critic" if isinstance(model, Critic) else None
    # As they are, not a copy: a shard is gathered and moved to the CPU when it is written.
    write_folder(folder, model.state_dict(), model.config, tokenizer, architecture=kind)


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer | Path,
    template: str | None = None,
    architecture: str | None = None,
) -> None:
    """`save_model` of tensors by name; `template` is the chat template, the plain ChatML one by default."""
    writes = distributed.first()
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(f".{folder.name}.replaced")
    if writes:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
    _write_tensors(partial, tensors, writes)
    if not writes:
        return
    dtype = tensors["model.norm.weight"].dtype
    values = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    _write_json(partial / "config.json", values | ({"architectures": [architecture]} if architecture else {}))
    if isinstance(tokenizer, Path):
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, partial / name)
    else:
        _write_tokenizer(partial, tokenizer, config, template or CHAT_TEMPLATE)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], writes: bool) -> None:
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + count, total + count
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [WEIGHTS]
    for file, names in zip(files, shards, strict=True):
        # Every rank joins in gathering; only the first keeps what was gathered.
        whole = {name: _gather(tensors[name], keep=writes) for name in names}
        if writes:
            _save(whole, folder / file, {"format": "pt"})
    if writes and len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as problem:
        raise OSError(f"{path} cannot be written: {problem}") from None


def _gather(tensor: Tensor, keep: bool) -> Tensor:
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.contiguous().cpu() if keep else whole.new_empty(0)


def load_actor(folder: Path, config: Config | None = None) -> Transformer:
    """The actor of a folder, in float32 whatever the file's type (master weights).

    Whole on the CPU, or spread over all ranks as `config` says: then each reads its part alone, and all must call.
    Raises WeightsError, naming the folder and what is wrong, for another architecture or other tensors.
    """
    return _load(Transformer, folder, config)


def load_critic(folder: Path, config: Config | None = None) -> Critic:
    """The critic of a folder, as `load_actor`. Raises WeightsError when the folder has no value head."""
    return _load(Critic, folder, config)


def read_config(folder: Path) -> ModelConfig:
    """The folder's ``config.json``; ids that ``generation_config.json`` adds end a turn too."""
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing: give a Hugging Face model folder, or hub:OWNER/NAME")
    try:
        config = ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
        path = folder / "generation_config.json"
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    found: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    more = [token for token in found if token not in config.stops]
    return replace(config, eos_token_id=(*config.stops, *more)) if more else config


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's ``tokenizer.json``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing: give a folder that holds a model and its tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no other
        raise _damaged(path, error) from error


def load_chat(folder: Path, config: ModelConfig, thinking: bool = False) -> Chat:
    """Conversations as the folder's tokenizer and chat template have them."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return Chat(load_tokenizer(folder), config, thinking, path.read_text(encoding="utf-8"))
    path = folder / "tokenizer_config.json"
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return Chat(load_tokenizer(folder), config, thinking, template or "")


def find_folder(place: str) -> Path:
    """The folder `place` itself; ``hub:OWNER/NAME`` is downloaded from Hugging Face's hub.

    Raises WeightsError where that cannot be: no package for it, no such model, no connection and no copy.
    """
    if not place.startswith("hub:"):
        return Path(place)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise WeightsError(f"{place} needs the package huggingface-hub: pip install 'terminal-rsi[hub]'") from None
    wanted = ["config.json", "*.safetensors", INDEX, *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(place.removeprefix("hub:"), allow_patterns=wanted))
    except (OSError, ValueError) as problem:  # its own errors are of these kinds
        raise WeightsError(f"{place} cannot be downloaded: {' '.join(str(problem).split())}") from problem


def check_files(folder: Path) -> None:
    """Raises WeightsError where a file of the folder's weights is missing or cut short; reads their headers alone."""
    _places(folder)


def sha256(folder: Path) -> str:
    """Hex digest over names, types, shapes and bytes of the folder's tensors, sorted by name.

    It does not depend on how the tensors are spread over files, nor on the files beside them.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_places(folder).items()):
        with _open(path) as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def _load(kind: type[Network], folder: Path, config: Config | None) -> Network:
    """A network with the folder's tensors, their type converted; of one that is spread only this rank's part is read.

    Raises WeightsError when a tensor is missing, left over or of another shape.
    """
    device = distributed.find_device() if config is not None else torch.device("cpu")
    model = distributed.empty(kind, read_config(folder), device, config)
    places = _places(folder)
    if kind is Critic and not any(name.startswith("value_head.") for name in places):
        raise WeightsError(f"{folder}: no value_head tensors: this is an actor, a critic's folder is needed")
    if kind is Transformer and "value_head.weight" in places:
        raise WeightsError(f"{folder}: has a value_head: this is a critic, an actor's folder is needed")
    names = _names(places)
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        head = names.pop(HEAD, None)
        if head is not None and EMBEDDING in names and not _equal(folder, places, head, names[EMBEDDING]):
            raise WeightsError(f"{folder}: config ties the embeddings, but {HEAD} differs from them")
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - names.keys())]
    problems += [f"{names[name]} is not part of the model" for name in sorted(names.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & names.keys()):
        # Opened anew for each tensor: what one has read from the file is out of memory before the next.
        with _open(places[names[name]]) as file:
            stored, parameter = file.get_slice(names[name]), wanted[name]
            shape, expected = tuple(stored.get_shape()), tuple(parameter.shape)
            if shape != expected:
                problems.append(f"{names[name]} has shape {shape}, the config says {expected}")
            elif not problems:
                distributed.copy_part(parameter, stored)
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(f"{folder}: {'; '.join(problems[:5])}{more}")
    return model


def export(actor: Path, folder: Path, original: Path) -> None:
    """Write `actor` as `original` would hold it: names, types, shards, index and every other file are `original`'s.

    Tensors that the actor has not (a vision tower, a head that predicts several tokens) are `original`'s, byte for
    byte. Raises WeightsError when the actor has a tensor that `original` has not.
    """
    trained, places = _places(actor), _places(original)
    ours, theirs = _names(trained), _names(places)
    if HEAD in theirs and HEAD not in ours and EMBEDDING in ours:
        ours[HEAD] = ours[EMBEDDING]  # tied, yet stored twice by the original
    different = sorted(ours.keys() ^ theirs.keys())
    if different:
        raise WeightsError(f"{actor} is no training of {original}: only one of them has {different[0]}")
    for name, stored in theirs.items():
        found, wanted = _shape(trained, ours[name]), _shape(places, stored)
        if found != wanted:
            raise WeightsError(f"{actor} is no training of {original}: {name} has shape {found}, not {wanted}")
    if folder.exists():
        raise WeightsError(f"{folder} exists: choose another folder")
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors", ".*"))
    source = {stored: ours[name] for name, stored in theirs.items()}
    for path in sorted(set(places.values())):
        with _open(path) as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        for name in tensors.keys() & source.keys():
            with _open(trained[source[name]]) as file:
                tensors[name] = file.get_tensor(source[name]).to(tensors[name].dtype)
        _save(tensors, folder / path.name, metadata)


def _places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of the folder."""
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (KeyError, ValueError) as error:
            raise _damaged(index, error) from error
    else:
        files = [WEIGHTS]
    places = {}
    for name in files:
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"{path} is missing: give a folder with safetensors weights")
        with _open(path) as file:
            places.update(dict.fromkeys(file.keys(), path))
    return places


def _names(places: Mapping[str, Path]) -> dict[str, str]:
    """The model's name of each tensor -> the folder's; vision and prediction towers are left out."""
    nested = "model.language_model."
    return {
        name.replace(nested, "model.", 1) if name.startswith(nested) else name: name
        for name in places
        if not name.startswith(OTHER_TOWERS)
    }


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{path}: {error}: the file is damaged, copy it again")


def _shape(places: Mapping[str, Path], name: str) -> tuple[int, ...]:
    with _open(places[name]) as file:
        return tuple(file.get_slice(name).get_shape())


def _equal(folder: Path, places: Mapping[str, Path], one: str, other: str) -> bool:
    with _open(places[one]) as first, _open(places[other]) as second:
        return torch.equal(first.get_tensor(one), second.get_tensor(other))


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig, template: str) -> None:
    # Not its own `save`, whose failures are no OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
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
            "chat_template": template,
        },
    )
    stops = list(config.stops or (tokenizer.token_to_id(END),))
    _write_json(
        folder / "generation_config.json", {"do_sample": True, "eos_token_id": stops, "pad_token_id": special[PAD]}
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """The command line; a wrong folder ends in one line and exit code 2."""
    from rsi.gguf import convert

    parser = argparse.ArgumentParser(prog="rsi.weights", description="Convert model folders.")
    commands = parser.add_subparsers(required=True)
    for name, function, places in (
        ("gguf", convert, ("FILE", "OUT")),
        ("export", export, ("ACTOR", "OUT", "ORIGINAL")),
    ):
        command = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        command.set_defaults(function=function, places=places)
        for place in places:
            command.add_argument(place, type=Path)
    found = vars(parser.parse_args(arguments))
    try:
        found["function"](*(found[place] for place in found["places"]))
    except (WeightsError, OSError) as problem:
        print(f"rsi.weights: error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    # Under the name by which rsi.gguf knows this module, so that there is one WeightsError.
    from rsi.weights import main as run

    run()
