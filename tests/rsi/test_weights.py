"""Model folders: transformers reads ours, we read transformers', and wrong folders are named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_chat import TOKENIZER
from tiny_models import TINY, perturbed

from rsi.chat import Chat, Message
from rsi.model import Critic, Transformer
from rsi.weights import WeightsError, load_actor, load_critic, load_tokenizer, save_model, sha256

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
    assert model.generation_config.eos_token_id == [CHAT.end, CHAT.pad]
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
    critic = Critic.from_actor(actor)
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
    save_model(tmp_path / "critic", Critic.from_actor(actor), TOKENIZER)
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
    (good / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"tokenizer\.json is missing"):
        load_tokenizer(good)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    save_actor(tmp_path / "actor")
    with safe_open(tmp_path / "actor" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()
    shutil.rmtree(tmp_path / "actor")
    save_actor(tmp_path / "actor", tied=False)
    with safe_open(tmp_path / "actor" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" in file.keys()
