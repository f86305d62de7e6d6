"""Decode and prefill beside transformers' generate, same weights, same run.

    python bench/sampler.py --threads 2                      SmolLM2-135M at batch 8 and 32, the tiny model at 64
    python bench/sampler.py --models tiny --batches 64

First the check: float32 greedy tokens must be transformers'. Then both in turn, medians over `--repeats` rounds, the
ratio's too; decode is the time of a whole generation less that of its prefill, over the new tokens. Our prefill
includes what each run of sampling begins with, laying out the weights. `ceiling` is what the matrix products of one
decoding step alone allow. The last line is one JSON object. Targets on two idle cores: 2 times transformers at batch 8
and 1.4 times at 32 for SmolLM2-135M in bfloat16, 12,000 tokens/s at batch 64 for the tiny model.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import smollm2
import torch
import transformers

from rsi.architecture import ModelConfig
from rsi.model import Transformer, keep_freed_memory
from rsi.packing import linear, pack
from rsi.sampler import Sampler
from rsi.weights import load_actor

TARGETS = {("smollm2-135m", 8): 2.0, ("smollm2-135m", 32): 1.4}
TINY_TARGET = 12_000


@dataclass
class Pair:
    """The same weights in both implementations."""

    name: str
    ours: Transformer
    theirs: transformers.PreTrainedModel

    def to(self, dtype: torch.dtype) -> "Pair":
        return Pair(self.name, self.ours.to(dtype), self.theirs.to(dtype))


def load(name: str) -> Pair:
    if name == "smollm2-135m":
        ours = load_actor(smollm2.folder())
    else:
        torch.manual_seed(0)
        ours = Transformer(ModelConfig(1024, 128, 384, 4, 4, 2, 32))
    config = transformers.AutoConfig.for_model(**ours.config.to_dict())
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.tie_weights()
    return Pair(name, ours.eval(), theirs.eval())


def ours_run(pair: Pair, prompts: torch.Tensor, new: int, temperature: float = 1.0) -> list[list[int]]:
    sampler = Sampler(pair.ours, len(prompts), prompts.shape[1] + new + 1)
    for seed, prompt in enumerate(prompts):
        sampler.submit(sampler.open(seed), prompt.tolist(), new)
    turns = sampler.advance((), temperature)  # without stops all end together
    return [turns[slot][0] for slot in range(len(prompts))]


def theirs_run(pair: Pair, prompts: torch.Tensor, new: int, temperature: float = 1.0) -> list[list[int]]:
    settings = transformers.GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=temperature > 0, top_k=0, pad_token_id=0
    )
    with torch.no_grad():
        out = pair.theirs.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
    return out[:, prompts.shape[1] :].tolist()


@torch.no_grad()
def ceiling(model: Transformer, batch: int) -> float:
    """Tokens a second if a step were its matrix products alone, with the weights as the sampler has them."""
    matrices = [pack(model.head_weight)]
    for layer in model.model.layer_weights():
        matrices += [*layer.mixer.inputs.matrices, layer.mixer.output, *layer.gate_up.matrices, layer.down]
    inputs = {size: torch.randn(batch, size, dtype=model.head_weight.dtype) for size in {m.shape[1] for m in matrices}}

    def step() -> None:
        for matrix in matrices:
            linear(inputs[matrix.shape[1]], matrix)

    step()
    return batch / statistics.median(seconds(step) for _ in range(9))


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def check(pair: Pair) -> None:
    prompts = torch.randint(3, 1000, (3, 24), generator=torch.Generator().manual_seed(1))
    ours, theirs = ours_run(pair, prompts, 12, 0.0), theirs_run(pair, prompts, 12, 0.0)
    if ours != theirs:
        raise SystemExit(f"{pair.name}: greedy tokens differ from transformers': {ours} and {theirs}")


def measure(pair: Pair, batch: int, prompt: int, new: int, repeats: int) -> dict[str, float]:
    prompts = torch.randint(3, 1000, (batch, prompt), generator=torch.Generator().manual_seed(2))
    runs = {"ours": ours_run, "transformers": theirs_run}
    rounds = []
    for _ in range(repeats):
        rates: dict[str, float] = {}
        for name, run in runs.items():
            first, whole = (seconds(partial(run, pair, prompts, count)) for count in (1, new))
            rates[f"{name}_tok_s"] = batch * (new - 1) / max(whole - first, 1e-9)
            rates[f"{name}_prefill_tok_s"] = batch * prompt / first
        rounds.append(rates | {"ratio": rates["ours_tok_s"] / rates["transformers_tok_s"]})
    found = {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]}
    return found | {"ceiling_tok_s": ceiling(pair.ours, batch)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "tiny"], choices=["smollm2-135m", "tiny"])
    parser.add_argument("--batches", type=int, nargs="+", help="default: 8 and 32 for smollm2-135m, 64 for tiny")
    parser.add_argument("--dtype", default="", help="default: bfloat16 for smollm2-135m, float32 for tiny")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    transformers.logging.set_verbosity_error()
    results = []
    for name in arguments.models:
        pair = load(name)
        check(pair)
        dtype = arguments.dtype or ("bfloat16" if name == "smollm2-135m" else "float32")
        pair = pair.to(getattr(torch, dtype))
        for batch in arguments.batches or ([8, 32] if name == "smollm2-135m" else [64]):
            found = measure(pair, batch, arguments.prompt, arguments.new, arguments.repeats)
            ratio = found["ratio"]
            wanted = TARGETS.get((name, batch))
            met = ratio >= wanted if wanted else found["ours_tok_s"] >= TINY_TARGET if name == "tiny" else None
            results.append({"model": name, "batch": batch, "dtype": dtype, "target_met": met, **found})
            print(
                f"{name} {dtype} batch {batch}: {found['ours_tok_s']:.0f} tokens/s, transformers "
                f"{found['transformers_tok_s']:.0f} ({ratio:.2f} times), products alone {found['ceiling_tok_s']:.0f}; "
                f"prefill {found['ours_prefill_tok_s']:.0f} and {found['transformers_prefill_tok_s']:.0f}",
                flush=True,
            )
    print(json.dumps(results[0] | {"threads": arguments.threads, "all": results}))


if __name__ == "__main__":
    main()
