"""TB-GAE's CPU path beside three ways in use today, on one thread.

    python bench/gae_peers.py

- token loop: from the last token to the first, all rows at once, holding its state at observations (as verl has it);
- plain loop: ordinary GAE at every token, observations included, all rows at once;
- chunked scan: action tokens packed to the left, then blocks of 128 as one triangular product each.

Each is first checked against `tb_gae` on the same data (for the plain loop with every token an action). They are timed
in turn, round after round. Times are medians in ms of wall clock, beside them the best run and the best of this
thread's own CPU time, for machines that are shared; memory that was freed is reused, as in training. The last line is
one JSON object.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable

import torch
from rsi_kernels import flags_from, tb_gae
from torch import Tensor

from rsi.model import keep_freed_memory

GAMMA, LAM = 0.99, 0.95
SHAPES = ((8, 4096), (8, 32768), (4, 131072))
Pair = tuple[Tensor, Tensor]


def token_loop(rewards: Tensor, values: Tensor, action: Tensor, turn: Tensor) -> Pair:
    """Advantages and returns by a Python loop over tokens that skips observations."""
    rows, tokens = values.shape
    keep = action.to(values.dtype)
    next_value, carried = torch.zeros(rows), torch.zeros(rows)
    next_turn = torch.full((rows,), -1, dtype=turn.dtype)
    advantages = torch.zeros_like(values)
    for t in reversed(range(tokens)):
        same = turn[:, t] == next_turn
        discount, decay = torch.where(same, 1.0, GAMMA), torch.where(same, 1.0, GAMMA * LAM)
        advantage = rewards[:, t] + discount * next_value - values[:, t] + decay * carried
        carried = torch.where(action[:, t], advantage, carried)
        next_value = torch.where(action[:, t], values[:, t], next_value)
        next_turn = torch.where(action[:, t], turn[:, t], next_turn)
        advantages[:, t] = carried * keep[:, t]
    return advantages, (advantages + values) * keep


def plain_loop(rewards: Tensor, values: Tensor) -> Pair:
    """Ordinary token GAE: no mask, no turns."""
    carried, next_value = torch.zeros(values.shape[0]), torch.zeros(values.shape[0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        carried = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * carried
        next_value = values[:, t]
        advantages[:, t] = carried
    return advantages, advantages + values


def chunked_scan(rewards: Tensor, values: Tensor, action: Tensor, turn: Tensor, block: int = 128) -> Pair:
    """Action tokens packed to the left, then from the right one triangular matrix product a block."""
    order = torch.argsort(action.logical_not().to(torch.int8), dim=1, stable=True)
    longest = int(action.sum(1).max())
    width = -(-longest // block) * block
    order = torch.nn.functional.pad(order[:, :longest], (0, width - longest))
    packed = torch.arange(width, device=values.device) < action.sum(1, keepdim=True)
    reward, value = (torch.where(packed, x.gather(1, order), 0.0).double() for x in (rewards, values))
    number = torch.where(packed, turn.gather(1, order), -1)
    following = torch.nn.functional.pad(packed[:, 1:], (0, 1))
    same = (number == torch.nn.functional.pad(number[:, 1:], (0, 1), value=-1)) & following
    discount = torch.where(same, 1.0, GAMMA).double()
    delta = reward + discount * torch.nn.functional.pad(value[:, 1:], (0, 1)) - value
    log_decay = torch.where(same, 0.0, math.log(GAMMA * LAM)).double()
    lower = torch.ones(block, block, dtype=torch.bool, device=values.device).triu()
    result, carried = torch.zeros_like(value), torch.zeros_like(value[:, 0])
    for start in reversed(range(0, width, block)):
        inside = slice(start, start + block)
        total = torch.nn.functional.pad(log_decay[:, inside].cumsum(1), (1, 0))
        weight = (total[:, None, :-1] - total[:, :-1, None]).masked_fill(~lower, -torch.inf).exp()
        result[:, inside] = (weight @ delta[:, inside, None])[..., 0]
        result[:, inside] += (total[:, -1:] - total[:, :-1]).exp() * carried[:, None]
        carried = result[:, start]
    advantages = torch.zeros_like(values)
    advantages.scatter_add_(1, order, torch.where(packed, result, 0.0).to(values.dtype))
    return advantages, torch.where(action, advantages + values, 0.0)


def conversation(rows: int, tokens: int, acts: int, observes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, action, turn: an observation, then a turn, again and again."""
    generator = torch.Generator().manual_seed(tokens)
    place = torch.arange(tokens)
    action = (place % (acts + observes) >= observes).expand(rows, -1).contiguous()
    turn = torch.where(action, place // (acts + observes), -1)
    rewards, values = (torch.randn(rows, tokens, generator=generator) for _ in range(2))
    return rewards, values, action, turn


def timed(runs: dict[str, Callable[[], Pair]], budget: float = 6.0) -> dict[str, float]:
    """Milliseconds of each, median and best of wall and of own CPU time: `name_ms`, `name_best_ms`, `name_cpu_ms`, ….

    In rounds of all, at least two, as many as fit the budget: on a shared machine what disturbs one disturbs its peers.
    A round has 20 ms of each, the short ones again and again.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    begun, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - begun < budget:
        rounds += 1
        for name, run in runs.items():
            started = time.perf_counter()
            while not (spent := time.perf_counter() - started) or spent < 0.02:
                wall, own = time.perf_counter(), time.thread_time()
                run()
                samples[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - own)))
    found = {}
    for name, pairs in samples.items():
        walls, owns = zip(*pairs, strict=True)
        found |= {f"{name}_ms": statistics.median(walls), f"{name}_cpu_ms": statistics.median(owns)}
        found |= {f"{name}_best_ms": min(walls), f"{name}_best_cpu_ms": min(owns)}
    return found


def check(name: str, ours: Pair, theirs: Pair) -> None:
    for a, b in zip(ours, theirs, strict=True):
        error = float((a - b).abs().max())
        if not error < 1e-3:
            raise SystemExit(f"{name} disagrees with tb_gae by {error:.3g}: no times are shown")


def measure(rows: int, tokens: int, loops: bool) -> dict[str, object]:
    """One shape: ours at long and short turns, from flags, and the peers at long turns."""
    data, short = conversation(rows, tokens, 200, 800), conversation(rows, tokens, 20, 80)
    rewards, values, action, turn = data
    flags = flags_from(action, turn)
    runs: dict[str, Callable[[], Pair]] = {
        "ours": lambda: tb_gae(*data, GAMMA, LAM),
        "ours_from_flags": lambda: tb_gae(rewards, values, gamma=GAMMA, lam=LAM, flags=flags),
        "chunked": lambda: chunked_scan(*data),
    }
    if loops:
        runs |= {"token_loop": lambda: token_loop(*data), "plain_loop": lambda: plain_loop(rewards, values)}
        everywhere = torch.ones_like(action), torch.zeros_like(turn)
        check("plain_loop", tb_gae(rewards, values, *everywhere, GAMMA, LAM, GAMMA, LAM), runs["plain_loop"]())
    ours = runs["ours"]()
    for name, run in runs.items():
        if name != "plain_loop":
            check(name, ours, run())
    check("chunked", tb_gae(*short, GAMMA, LAM), chunked_scan(*short))
    return {"shape": [rows, tokens], **timed(runs | {"ours_short_turns": lambda: tb_gae(*short, GAMMA, LAM)})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-loops", action="store_true", help="leave out the two loops, which take seconds a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"torch {torch.__version__}, {platform.machine()}, one thread; ms, median (best, best own CPU)")
    names = ["ours", "ours_short_turns", "ours_from_flags", "chunked"]
    names += [] if options.no_loops else ["token_loop", "plain_loop"]
    print("| shape | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    table = []
    for rows, tokens in SHAPES:
        found = measure(rows, tokens, not options.no_loops)
        cells = [
            f"{found[f'{name}_ms']:.2f} ({found[f'{name}_best_ms']:.2f}, {found[f'{name}_best_cpu_ms']:.2f})"
            for name in names
        ]
        print(f"| {[rows, tokens]} | " + " | ".join(cells) + " |", flush=True)
        table.append(found)
    print(json.dumps({"gae": table}))


if __name__ == "__main__":
    main()
