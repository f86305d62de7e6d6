"""How training scales: over ranks, over context length, and, simulated, to the cluster that a 27B model needs.

    python bench/scaling.py               # ranks and context, on this machine
    python bench/scaling.py --simulate 64 # one training step of qwen3.8-27b on 64 ranks, without weights

Ranks: tokens/s and peak memory of one supervised step of a 24 M-parameter model on 1 and 2 processes. Context: the
same number of tokens in ever longer sequences, for full attention and for the hybrid. Simulation: FSDP2 itself runs,
on tensors without storage and a process group without a network, so what it gathers and keeps is counted, not
computed by hand. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rsi import distributed
from rsi.architecture import PUBLISHED, ModelConfig
from rsi.config import Config
from rsi.model import Transformer
from rsi.report import open_console

GIB = 2**30
VOCABULARY = 4096
FULL = ModelConfig(VOCABULARY, 512, 1536, 8, 8, 4, 64)
HYBRID = ModelConfig.from_dict(
    {
        "model_type": "qwen3_5_text", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": True, "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
)  # fmt: skip
DENSE = ModelConfig(VOCABULARY, 256, 768, 4, 4, 2, 64)


def rank_worker(tokens: int, width: int, repeats: int) -> None:
    """One process of the measurement over ranks: its share of `tokens`."""
    torch.set_num_threads(1)
    distributed.start()
    torch.manual_seed(0)
    model = Transformer(FULL)
    distributed.spread(model, Config())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    rows = tokens // width // distributed.world()
    ids_BT = torch.randint(VOCABULARY, (rows, width))
    seconds = []
    for _ in range(repeats):
        distributed.meet("step")
        begun = time.perf_counter()
        hidden_BTD = model(ids_BT)
        model.logits(hidden_BTD.flatten(0, 1)).log_softmax(-1)[:, 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.meet("step done")
        seconds.append(time.perf_counter() - begun)
    memory = distributed.gather("memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if distributed.first():
        median = sorted(seconds[1:])[len(seconds[1:]) // 2]
        print(json.dumps({"tokens_per_second": round(tokens / median), "peak_gib_a_rank": round(max(memory) / GIB, 2)}))
    distributed.meet("the end")
    distributed.stop()


def over_ranks(tokens: int) -> list[dict[str, Any]]:
    found = []
    for ranks in (1, 2):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*launch, __file__, "--rank-worker", str(tokens)], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append({"ranks": ranks, **json.loads(done.stdout.splitlines()[-1])})
    return found


def over_context(tokens: int, lengths: list[int]) -> list[dict[str, Any]]:
    """Seconds a token of forward and backward, for sequences of every length; two threads."""
    torch.set_num_threads(2)
    found: list[dict[str, Any]] = [{"length": length} for length in lengths]
    for name, config in (("full", DENSE), ("hybrid", HYBRID)):
        torch.manual_seed(0)
        model = Transformer(config)
        for entry in found:
            ids_BT = torch.randint(VOCABULARY, (tokens // entry["length"], entry["length"]))
            seconds: list[float] = []
            while len(seconds) < 2 and sum(seconds) < 20:  # where one pass takes long, warming up does not matter
                begun = time.perf_counter()
                model(ids_BT).float().square().mean().backward()
                seconds.append(time.perf_counter() - begun)
            entry[f"{name}_us_a_token"] = round(1e6 * min(seconds) / tokens, 1)
    return found


class Traffic(TorchDispatchMode):
    """Adds up the bytes of every collective: of what is gathered, of what is reduced before it is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1] if str(func).startswith("c10d.") else ""
        if name:
            sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def simulate(ranks: int, tokens: int, layers: int | None) -> dict[str, Any]:
    """Memory and traffic of one rank in a training step of one network of Qwen3.8-27B."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    config = PUBLISHED["Qwen/Qwen3.8-27B"]
    if layers:
        config = dataclasses.replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])
    with torch.device("meta"):
        model = Transformer(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    distributed.spread(model, Config(precision="bfloat16", recompute=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        local = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
        tracker = FSDPMemTracker(model)
        with tracker, (traffic := Traffic()):
            hidden_BTD = model(torch.zeros(1, tokens, dtype=torch.int64))
            model.logits(hidden_BTD[0, : tokens // 8]).log_softmax(-1)[:, 0].mean().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    parts = {str(getattr(kind, "value", kind)): round(size / GIB, 2) for kind, size in peak.items() if size}
    return {
        "ranks": ranks, "tokens_a_rank": tokens, "parameters": total, "parameters_a_rank": local,
        "peak_gib": parts, "moments_gib": round(8 * local / GIB, 2),
        "traffic_gib": {name: round(size / GIB, 1) for name, size in traffic.bytes.items() if size > 2**20},
    }  # fmt: skip


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    open_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="of one step")
    parser.add_argument("--simulate", type=int, metavar="RANKS")
    parser.add_argument("--simulated-tokens", type=int, default=512, help="of one rank's micro-batch")
    parser.add_argument("--simulated-layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--rank-worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_worker:
        rank_worker(arguments.rank_worker, 256, 6)
        return
    if arguments.simulate:
        result = simulate(arguments.simulate, arguments.simulated_tokens, arguments.simulated_layers)
        for name, value in result.items():
            print(f"{name:18} {value}")
        print(json.dumps({"simulation": result}))
        return
    ranks = over_ranks(arguments.tokens // 4)
    show("one step on 1 and 2 processes", ranks)
    context = over_context(arguments.tokens, [1024 * 2**power for power in range(6)])
    show(f"{arguments.tokens} tokens in sequences of one length", context)
    print(json.dumps({"ranks": ranks, "context": context}))


if __name__ == "__main__":
    main()
