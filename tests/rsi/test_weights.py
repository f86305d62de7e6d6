"""Model folders: transformers reads ours, we read transformers', and wrong folders are named."""

import json
import re
import resource
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_chat import TOKENIZER
from test_distributed import torchrun
from tiny_models import FAMILIES, TINY, perturbed
from tokenizers import Tokenizer

from rsi.chat import NO_THINKING, Chat, Message
from rsi.distributed import copy_of
from rsi.model import Critic, Transformer
from rsi.weights import (
    WeightsError,
    export,
    find_folder,
    load_actor,
    load_chat,
    load_critic,
    load_tokenizer,
    main,
    save_model,
    sha256,
)

CHAT = Chat(TOKENIZER)
CONFIG = replace(TINY, vocab_size=TOKENIZER.get_vocab_size(), eos_token_id=CHAT.end)


def save_actor(folder: Path, tied: bool = True) -> Transformer:
    actor = perturbed(replace(CONFIG, tie_word_embeddings=tied))
    save_model(folder, actor, TOKENIZER)
    return actor


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_our_folder(tmp_path: Path, tied: bool) -> None:
    actor = save_actor(tmp_path / "actor", tied)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "actor", output_loading_info=True)
    assert isinstance(model, transformers.Qwen3ForCausalLM)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([CHAT.prompt([Message("user", "sort names.txt")])])
    torch.testing.assert_close(actor.logits(actor(ids)), model(ids).logits, atol=2e-5, rtol=2e-5)
    assert model.generation_config.eos_token_id == [CHAT.end]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (CHAT.end, CHAT.pad)
    messages = [Message("system", "terminus"), Message("user", "sort names.txt 😀")]
    text = tokenizer.apply_chat_template(
        [message._asdict() for message in messages], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == CHAT.prompt(messages)


@pytest.mark.parametrize("tied", [True, False])
def test_we_read_what_transformers_writes(tmp_path: Path, tied: bool) -> None:
    actor = save_actor(tmp_path / "actor", tied)
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "actor")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    for name in ("whole", "shards"):
        again = load_actor(tmp_path / name)
        assert same_parameters(actor, again)
        assert again.config == actor.config
        assert sha256(tmp_path / name) == sha256(tmp_path / "actor")


def test_actor_and_critic_round_trip(tmp_path: Path) -> None:
    actor = save_actor(tmp_path / "deep" / "actor")
    critic = copy_of(actor, Critic)
    save_model(tmp_path / "critic", critic, TOKENIZER)
    assert same_parameters(load_actor(tmp_path / "deep" / "actor"), actor)
    assert same_parameters(load_critic(tmp_path / "critic"), critic)
    assert load_tokenizer(tmp_path / "critic").to_str() == TOKENIZER.to_str()
    assert load_actor(tmp_path / "deep" / "actor").config == actor.config


def test_bfloat16_files_become_float32_weights(tmp_path: Path) -> None:
    actor = perturbed(CONFIG).bfloat16()
    save_model(tmp_path / "actor", actor, TOKENIZER)
    again = load_actor(tmp_path / "actor")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert same_parameters(again, actor.float())


def test_saving_replaces_the_whole_folder(tmp_path: Path) -> None:
    save_actor(tmp_path / "actor")
    before = sha256(tmp_path / "actor")
    (tmp_path / "actor" / "stale.txt").write_text("old")
    (tmp_path / ".actor.partial").mkdir()
    (tmp_path / ".actor.partial" / "left.txt").write_text("a save that was killed")
    save_model(tmp_path / "actor", perturbed(CONFIG, seed=1), TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sha256(tmp_path / "actor") != before


def test_sha256_sees_every_tensor(tmp_path: Path) -> None:
    save_actor(tmp_path / "actor")
    original = sha256(tmp_path / "actor")
    assert sha256(tmp_path / "actor") == original
    path = tmp_path / "actor" / "model.safetensors"
    tensors = load_file(path)
    digests = {original}
    for name in tensors:
        changed = tensors | {name: tensors[name].clone()}
        changed[name].view(-1)[-1] += 1e-3
        save_file(changed, path)
        digests.add(sha256(tmp_path / "actor"))
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].view(1, -1)}, path)
    digests.add(sha256(tmp_path / "actor"))
    save_file({("x" + name if name == "model.norm.weight" else name): value for name, value in tensors.items()}, path)
    digests.add(sha256(tmp_path / "actor"))
    assert len(digests) == len(tensors) + 3
    save_file(tensors, path, metadata={"other": "header"})
    assert sha256(tmp_path / "actor") == original


def test_a_critic_without_its_head_is_refused(tmp_path: Path) -> None:
    actor = save_actor(tmp_path / "actor")
    with pytest.raises(WeightsError, match="no value_head tensors: this is an actor"):
        load_critic(tmp_path / "actor")
    save_model(tmp_path / "critic", copy_of(actor, Critic), TOKENIZER)
    with pytest.raises(WeightsError, match="has a value_head: this is a critic"):
        load_actor(tmp_path / "critic")
    path = tmp_path / "critic" / "model.safetensors"
    tensors = load_file(path)
    del tensors["value_head.bias"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"value_head\.bias is missing"):
        load_critic(tmp_path / "critic")


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        load_actor(tmp_path / "nowhere")
    good = tmp_path / "good"
    save_actor(good)
    path = good / "model.safetensors"
    tensors, whole = load_file(path), path.read_bytes()

    save_file({name: value for name, value in tensors.items() if "layers.1.mlp" not in name}, path)
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.down_proj\.weight is missing"):
        load_actor(good)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, path)
    with pytest.raises(WeightsError, match=r"q_proj\.bias is not part of the model"):
        load_actor(good)
    save_file(tensors | {"model.norm.weight": torch.ones(7)}, path)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \(7,\), the config says \(32,\)"):
        load_actor(good)
    save_file(tensors | {"lm_head.weight": torch.ones(CONFIG.vocab_size, 32)}, path)
    with pytest.raises(WeightsError, match=r"ties the embeddings, but lm_head\.weight differs"):
        load_actor(good)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    load_actor(good)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"model\.safetensors.*damaged"):
        load_actor(good)
    path.unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing"):
        load_actor(good)
    path.write_bytes(whole)
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(WeightsError, match=r"config\.json: model_type is 'llama'"):
        load_actor(good)
    (good / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: Expecting"):
        load_actor(good)
    index = good / "model.safetensors.index.json"
    for text in ("{", "{}"):
        index.write_text(text)
        with pytest.raises(WeightsError, match=r"index\.json: .*damaged"):
            sha256(good)
    (good / "chat_template.jinja").unlink(missing_ok=True)
    for text in ("{", "[]", '{"chat_template": [{}]}'):
        (good / "tokenizer_config.json").write_text(text)
        with pytest.raises(WeightsError, match=r"tokenizer_config\.json: .*damaged"):
            load_chat(good, TINY)
    (good / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: .*damaged"):
        load_tokenizer(good)
    (good / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"tokenizer\.json is missing"):
        load_tokenizer(good)


def test_a_folder_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save_actor(tmp_path / "actor")
    before, sizes = sha256(tmp_path / "actor"), {path.stat().st_size for path in (tmp_path / "actor").iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sizes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limit[1]))
        try:
            with pytest.raises(OSError, match=r"File too large"):
                save_actor(tmp_path / "actor")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert sha256(tmp_path / "actor") == before
    save_actor(tmp_path / "actor")


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    save_actor(tmp_path / "actor")
    with safe_open(tmp_path / "actor" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()
    shutil.rmtree(tmp_path / "actor")
    save_actor(tmp_path / "actor", tied=False)
    with safe_open(tmp_path / "actor" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" in file.keys()


@pytest.mark.parametrize("place", ["file", "settings", "list", "nowhere"])
def test_a_folders_chat_template_says_how_a_turn_is_asked_for(tmp_path: Path, place: str) -> None:
    save_actor(tmp_path)
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    values = json.loads(path.read_text())
    del values["chat_template"]
    template = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif place != "nowhere":
        others = [{"name": "tool_use", "template": ""}, {"name": "default", "template": template}]
        values["chat_template"] = template if place == "settings" else others
    path.write_text(json.dumps(values))
    assert load_chat(tmp_path, CONFIG).opening == (NO_THINKING if place == "nowhere" else "<think>\n")
    path.unlink()
    assert load_chat(tmp_path, CONFIG).opening == ("<think>\n" if place == "file" else NO_THINKING)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def multimodal(folder: Path, tied: bool) -> None:
    """A folder as Qwen publishes them: nested config, vision tower, a prediction layer, two types, shards; the inner
    config wrong about the head."""
    sizes = {"vocab_size": 384, "max_position_embeddings": 2048}
    text = FAMILIES["qwen3_5"].to_dict() | sizes | {"dtype": "bfloat16", "tie_word_embeddings": not tied}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            parameter.data = parameter.data.float()
    model.save_pretrained(folder, max_shard_size="40KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"mtp.fc.weight": torch.randn(4, 8).bfloat16()}, folder / "mtp.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_the_original_with_other_weights(tmp_path: Path, tied: bool) -> None:
    multimodal(tmp_path / "original", tied)
    before = stored(tmp_path / "original")
    assert ("lm_head.weight" in before) != tied
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32}
    assert any(name.startswith("model.language_model.layers") for name in before)
    actor = load_actor(tmp_path / "original")
    save_model(tmp_path / "actor", actor, TOKENIZER)
    main(["export", str(tmp_path / "actor"), str(tmp_path / "same"), str(tmp_path / "original")])
    for path in (tmp_path / "original").iterdir():
        copy = (tmp_path / "same" / path.name).read_bytes()
        assert copy == path.read_bytes() or path.suffix == ".safetensors", path.name
    after = stored(tmp_path / "same")
    assert after.keys() == before.keys() and sha256(tmp_path / "same") == sha256(tmp_path / "original")

    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1.0)
    save_model(tmp_path / "actor", actor, TOKENIZER)
    export(tmp_path / "actor", tmp_path / "changed", tmp_path / "original")
    for name, tensor in stored(tmp_path / "changed").items():
        ours = not name.startswith(("model.visual.", "mtp."))
        assert torch.equal(tensor, before[name]) != ours and tensor.dtype == before[name].dtype, name
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "changed", dtype=torch.bfloat16)
    ids = torch.randint(0, 96, (1, 20))
    trained = load_actor(tmp_path / "changed").bfloat16()
    with torch.no_grad():
        assert torch.equal(trained.logits(trained(ids)), again(ids).logits.float())

    save_model(tmp_path / "other", perturbed(CONFIG), TOKENIZER)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "other"), str(tmp_path / "wrong"), str(tmp_path / "original")])
    wide = replace(actor.config, intermediate_size=128)  # the same names, as Qwen3-0.6B's are Qwen3-1.7B's
    save_model(tmp_path / "wide", perturbed(wide), TOKENIZER)
    with pytest.raises(WeightsError, match=r"mlp\.\w+\.weight has shape \(\d+, \d+\), not"):
        export(tmp_path / "wide", tmp_path / "wrong", tmp_path / "original")
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(WeightsError, match="changed exists: choose another"):
        export(tmp_path / "actor", tmp_path / "changed", tmp_path / "original")


def test_a_tied_head_that_the_original_stores_too_is_exported_with_it(tmp_path: Path) -> None:
    actor = save_actor(tmp_path / "original")
    path = tmp_path / "original" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    with torch.no_grad():
        actor.model.embed_tokens.weight.add_(1.0)
    save_model(tmp_path / "actor", actor, TOKENIZER)
    export(tmp_path / "actor", tmp_path / "exported", tmp_path / "original")
    found = stored(tmp_path / "exported")
    assert torch.equal(found["lm_head.weight"], actor.model.embed_tokens.weight) and len(found) == len(tensors) + 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_folders_pass_through_transformers_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool
) -> None:
    """Ours to theirs to ours, theirs to ours to theirs: names, types, shapes, bytes, and the shards of an export."""
    monkeypatch.setattr("rsi.weights.SHARD_BYTES", 40_000)
    sizes = {"vocab_size": CONFIG.vocab_size, "eos_token_id": CHAT.end, "tie_word_embeddings": tied}
    actor = perturbed(replace(FAMILIES[family], **sizes))
    save_model(tmp_path / "ours", actor, TOKENIZER)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(tmp_path / "ours").keys()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(tmp_path / f"theirs-{dtype}", max_shard_size="40KB")
    again = load_actor(tmp_path / "theirs-torch.float32")
    assert same_parameters(again, actor) and again.config == actor.config
    original = tmp_path / "theirs-torch.bfloat16"
    save_model(tmp_path / "float32", load_actor(original), TOKENIZER)
    export(tmp_path / "float32", tmp_path / "exported", original)
    assert sha256(tmp_path / "exported") == sha256(original)
    for name in ("config.json", "model.safetensors.index.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (original / name).read_bytes()


SHARDED_LOAD = """
import sys
from pathlib import Path
from rsi import distributed
from rsi.config import Config
from rsi.model import Critic
from rsi.weights import load_actor, load_tokenizer, save_model

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

def measured(make):
    distributed.meet("all that was before is done")
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    network = make()
    distributed.meet("made")
    return network, peak() - before

folder, config = Path(sys.argv[1]), Config()
distributed.start()
load_actor(folder.with_name("small"), config)  # what is imported at the first call is not measured
actor, loading = measured(lambda: load_actor(folder, config))
critic, creating = measured(lambda: distributed.copy_of(actor, Critic, config))
for name, network in (("again", actor), ("critic", critic)):
    save_model(folder.with_name(name), network, load_tokenizer(folder))
whole = sum(parameter.numel() for parameter in actor.parameters()) * 4
print(f"rank {distributed.rank()}: {loading} {creating} {whole}", flush=True)
distributed.meet("the end")
distributed.stop()
"""


@pytest.mark.timeout(300)
def test_ranks_read_their_part_alone(tmp_path: Path) -> None:
    """As the stages load an actor and make a critic of it: a rank needs its shard and the memory of one tensor."""
    config = replace(CONFIG, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, head_dim=64)
    save_model(tmp_path / "actor", perturbed(config), TOKENIZER)
    save_actor(tmp_path / "small")
    (tmp_path / "load.py").write_text(SHARDED_LOAD)
    done = torchrun(2, str(tmp_path / "load.py"), str(tmp_path / "actor"))
    assert done.returncode == 0, done.stderr
    measured = re.findall(r"rank (\d): (\d+) (\d+) (\d+)", done.stdout)
    assert sorted(rank for rank, *_ in measured) == ["0", "1"]
    for _, loading, creating, whole in measured:
        for added in (loading, creating):
            assert 0.45 * int(whole) < int(added) < 0.65 * int(whole)
    assert sha256(tmp_path / "again") == sha256(tmp_path / "actor")
    assert same_parameters(load_critic(tmp_path / "critic"), copy_of(load_actor(tmp_path / "actor"), Critic))


class Hub(BaseHTTPRequestHandler):
    """One model of the hub, on this machine: what the client asks for in order to download it."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        name = path.rpartition("/")[2]
        files = sorted(file.name for file in self.folder.iterdir())
        if path.startswith("/api/models/some/model/tree/"):
            content = [
                {"type": "file", "path": file, "oid": file, "size": (self.folder / file).stat().st_size}
                for file in files
            ]
            self.answer(200, json.dumps(content).encode())
        elif path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": file} for file in files]
            self.answer(200, json.dumps({"id": "some/model", "sha": "0" * 40, "siblings": siblings}).encode())
        elif path.startswith("/some/model/resolve/") and name in files:
            self.answer(200, (self.folder / name).read_bytes(), {"ETag": f'"{name}"'})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": "0" * 40, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the tests' output."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    constants = pytest.importorskip("huggingface_hub", reason="needs the extra hub").constants
    Hub.folder, Hub.asked = tmp_path / "served", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_of_the_hub_is_downloaded(hub: type[Hub]) -> None:
    """The package's own client, with a hub on this machine: what it brings is the model; the rest stays there."""
    actor = save_actor(hub.folder)
    (hub.folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    found = find_folder("hub:some/model")
    assert same_parameters(load_actor(found), actor) and load_tokenizer(found).to_str() == TOKENIZER.to_str()
    assert not (found / "pytorch_model.bin").exists() and not any(path.endswith(".bin") for path in hub.asked)
    with pytest.raises(WeightsError, match=r"hub:no/model cannot be downloaded: .*404"):
        find_folder("hub:no/model")
    with pytest.raises(WeightsError, match="hub:no model at all cannot be downloaded: "):
        find_folder("hub:no model at all")


def test_without_the_hubs_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_folder("some/where") == Path("some/where")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match=r"needs the package huggingface-hub: pip install 'terminal-rsi\[hub\]'"):
        find_folder("hub:Qwen/Qwen3-0.6B")
