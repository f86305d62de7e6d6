"""Every family against a committed file: weights, ids, log-probs and gradients that transformers computed.

Needs no transformers. `python tests/rsi/test_golden.py` writes the files anew from it.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, perturbed

from rsi.model import Transformer

FOLDER = Path(__file__).parent / "golden"


def results(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [2, T - 1] of every token but the first of each row."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_the_golden_file(family: str) -> None:
    golden = load_file(FOLDER / f"{family}.safetensors")
    actor = Transformer(FAMILIES[family])
    weights = {name: golden[f"weight/{name}"].float() for name in actor.state_dict()}
    actor.load_state_dict(weights)
    logprobs = results(actor.logits(actor(golden["ids"])), golden["ids"])
    torch.testing.assert_close(logprobs, golden["logprobs"], atol=2e-5, rtol=0)
    logprobs.mean().backward()
    for name, parameter in actor.named_parameters():
        wanted = golden[f"gradient/{name}"]
        assert (parameter.grad - wanted).norm() < 1e-4 * wanted.norm(), name


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000


def write() -> None:
    import transformers

    FOLDER.mkdir(exist_ok=True)
    for family, config in FAMILIES.items():
        actor = perturbed(config).bfloat16().float()  # such weights take half the space
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config.to_dict()), dtype=torch.float32
        )
        reference.load_state_dict(actor.state_dict(), strict=False)
        reference.tie_weights()
        ids = torch.randint(0, config.vocab_size, (2, 131))
        logprobs = results(reference(ids).logits, ids)
        logprobs.mean().backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        tensors = {f"weight/{name}": tensor.bfloat16() for name, tensor in actor.state_dict().items()}
        tensors |= {f"gradient/{name}": gradients[name] for name, _ in actor.named_parameters()}
        save_file(tensors | {"ids": ids, "logprobs": logprobs.detach()}, FOLDER / f"{family}.safetensors")


if __name__ == "__main__":
    write()
