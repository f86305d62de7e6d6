"""One supervised training step: ours, packed, beside transformers, padded, on the same weights and tokens.

    python bench/train_step.py --threads 2

Ours runs the documents of a batch packed in rows and computes log-probs of the action tokens without a [tokens,
vocabulary] tensor; transformers pads rows to micro-batches of as many tokens, and takes the plain cross-entropy of its
logits: "sorted" with rows of similar length together, "unsorted" with the documents in the order they come, as its
trainer does where nothing else is asked for. Each in a process of its own, so that each one's peak memory is its own,
in turns, medians over `--rounds`. First the check: losses and gradient norms must agree. The last line is one JSON
object. Targets: 1.3 times the tokens/s on a realistic mix of lengths, 0.6 times the peak memory at 152k tokens.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rsi_kernels import linear_logprob

from rsi.architecture import ModelConfig
from rsi.model import Transformer, keep_freed_memory

Documents = list[torch.Tensor]
SIDES = ("ours", "sorted", "unsorted")
CASES = {
    # name: sizes, documents, shortest and longest document, tokens of a micro-batch
    "mixed lengths": (ModelConfig(1024, 256, 768, 4, 8, 4, 32), 32, 32, 768, 2048),
    "vocabulary of 152k": (ModelConfig(151936, 128, 384, 2, 4, 2, 32), 6, 64, 256, 1024),
}


def documents(case: str) -> Documents:
    """Random ids of lengths as agents' attempts have them: many short ones, a few long ones."""
    config, count, shortest, longest, _ = CASES[case]
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = [int(shortest * (longest / shortest) ** draw.random()) for _ in range(count)]
    return [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]


def groups(found: Documents, tokens: int, padded: bool) -> Iterator[Documents]:
    """Micro-batches of at most `tokens` tokens, of the documents in their order; with `padded`, padding counts too."""
    group: Documents = []
    for document in found:
        longest = max(len(other) for other in [*group, document])
        size = (len(group) + 1) * longest if padded else sum(map(len, group)) + len(document)
        if group and size > tokens:
            yield group
            group = []
        group.append(document)
    yield group


def ours(case: str) -> Callable[[], tuple[float, float]]:
    torch.manual_seed(0)
    model, found = Transformer(CASES[case][0]), documents(case)
    count = sum(len(document) - 1 for document in found)

    def step() -> tuple[float, float]:
        model.zero_grad()
        total = 0.0
        for group in groups(found, CASES[case][4], padded=False):
            cu_seqlens = torch.tensor([0, *map(len, group)]).cumsum(0)
            ids = torch.cat(group)
            target = ids.roll(-1)
            target[cu_seqlens[1:] - 1] = -100  # the last token of a document predicts nothing
            logprob, _ = linear_logprob(model(ids[None], cu_seqlens)[0], model.head_weight, target)
            loss = -logprob.sum() / count
            loss.backward()
            total += float(loss.detach())
        return total, gradient_norm(model)

    return step


def theirs(case: str, by_length: bool) -> Callable[[], tuple[float, float]]:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    start = Transformer(CASES[case][0])
    config = transformers.AutoConfig.for_model(**start.config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(start.state_dict(), strict=False)
    model.tie_weights()
    del start
    found = sorted(documents(case), key=len, reverse=True) if by_length else documents(case)
    count = sum(len(document) - 1 for document in found)

    def step() -> tuple[float, float]:
        model.zero_grad()
        total = 0.0
        for group in groups(found, CASES[case][4], padded=True):
            ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
            real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(document) for document in group], batch_first=True)
            target = ids.masked_fill(real == 0, -100)[:, 1:].flatten()
            logits = model(ids, attention_mask=real, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target, reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        return total, gradient_norm(model)

    return step


def gradient_norm(model: torch.nn.Module) -> float:
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def worker(side: str, case: str, repeats: int, threads: int) -> None:
    """One side alone in this process: prints its loss, gradient norm, seconds a step and bytes above the start."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    step = ours(case) if side == "ours" else theirs(case, by_length=side == "sorted")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts anew
    before = memory("VmRSS")
    loss, norm = step()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    peak = memory("VmHWM") - before
    print(json.dumps({"loss": loss, "norm": norm, "seconds": statistics.median(times), "peak_bytes": peak}))


def memory(name: str) -> int:
    """Bytes that Linux reports for this process under `name`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="steps a process is timed for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker, arguments.repeats, arguments.threads)
        return
    results = {}
    for case in CASES:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, "--worker", side, case]
                command += ["--repeats", str(arguments.repeats), "--threads", str(arguments.threads)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[side].append(json.loads(out.splitlines()[-1]))
        found = {
            side: {name: statistics.median(run[name] for run in of) for name in of[0]} for side, of in runs.items()
        }
        us = found["ours"]
        tokens = sum(map(len, documents(case)))
        results[case] = {"ours_tok_s": tokens / us["seconds"], "ours_peak_mb": us["peak_bytes"] / 1e6}
        for side in SIDES[1:]:
            them = found[side]
            for name in ("loss", "norm"):
                if abs(us[name] - them[name]) > 1e-4 * abs(them[name]):
                    raise SystemExit(f"{case}: {name} is {us[name]}, transformers' {them[name]}")
            results[case] |= {
                f"{side}_tok_s": tokens / them["seconds"],
                f"{side}_peak_mb": them["peak_bytes"] / 1e6,
                f"speed_to_{side}": them["seconds"] / us["seconds"],
                f"memory_to_{side}": us["peak_bytes"] / them["peak_bytes"],
            }
        seen = results[case]
        print(f"{case}: {seen['ours_tok_s']:.0f} tokens/s, peak {seen['ours_peak_mb']:.0f} MB", flush=True)
        for side in SIDES[1:]:
            print(
                f"  transformers, {side}: {seen[f'{side}_tok_s']:.0f} tokens/s, peak {seen[f'{side}_peak_mb']:.0f} MB; "
                f"ours {seen[f'speed_to_{side}']:.2f} times as fast, with {seen[f'memory_to_{side}']:.2f} of the memory"
            )
    print(json.dumps({"threads": arguments.threads, "cases": results}))


if __name__ == "__main__":
    main()
