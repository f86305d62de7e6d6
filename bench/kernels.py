"""Every op of rsi_kernels beside its plain-torch reference, torch.compile of that, and Liger-Kernel where installed.

Below them the trainer's own rms_norm, rope and swiglu, beside torch's: why the package has no kernels for those.

    python bench/kernels.py                 CPU or CUDA, whichever torch sees
    python bench/kernels.py --quick         small shapes, for a look

An op is timed only after its values and gradients agree with the reference in float64 (at a small shape). Times are
medians of forward plus backward, in ms: device (CUDA events, cold second-level cache) and wall; on a CPU wall and
this thread's own time. Memory is the peak above what the inputs hold. The floor is the op's least traffic over the
bandwidth of a plain copy, or its matrix products over the speed of a plain one, both measured here first.
The last line is one JSON object.
"""

import argparse
import ctypes
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gae_peers import chunked_scan, conversation
from rsi_kernels import flags_from, gated_delta_rule, linear_logprob, ppo_loss, reference, tb_gae, value_loss
from rsi_kernels.gated_delta_rule import recurrent
from torch import Tensor

from rsi import model

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Step = Callable[..., tuple[Tensor, ...]]


@dataclass
class Case:
    """One op at one shape. `leaves` come first among the arguments and are what gradients are taken of."""

    op: str
    shape: str
    leaves: list[Tensor]
    others: list[Any]
    ours: Step
    baselines: dict[str, Step]
    bytes: float = 0.0
    flops: float = 0.0
    compiles: bool = True
    upstream: list[Tensor] = field(default_factory=list)

    def run(self, step: Step) -> list[Tensor]:
        """Outputs and gradients."""
        out = [x for x in step(*self.leaves, *self.others) if x.is_floating_point()]
        if not self.leaves:
            return out
        moving = [x for x in out if x.requires_grad]
        if not self.upstream:
            generator = torch.Generator().manual_seed(1)
            self.upstream = [torch.randn(x.shape, generator=generator).to(x) for x in moving]
        upstream = [u.to(x.dtype) for u, x in zip(self.upstream, moving, strict=True)]
        return [*moving, *torch.autograd.grad(moving, self.leaves, upstream)]


def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if max(shape) > 100_000:  # too large to draw on the CPU
        return (torch.randn(*shape, device=DEVICE, dtype=dtype) * scale).requires_grad_(grad)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_(grad)


def head_case(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Case:
    def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, target, 1.0, -100, 1, True
        )[:2]  # fmt: skip
        return -loss, entropy

    target = torch.arange(tokens, device=DEVICE) * 7919 % vocabulary
    baselines: dict[str, Step] = {"reference": reference.linear_logprob}
    if find_spec("liger_kernel"):
        baselines["liger"] = liger
    leaves = [random(tokens, width, dtype=dtype), random(vocabulary, width, dtype=dtype, scale=width**-0.5)]
    return Case(
        "linear_logprob", f"N {tokens}, D {width}, V {vocabulary}, {dtype}".replace("torch.", ""), leaves, [target],
        linear_logprob, baselines, flops=4 * 2.0 * tokens * width * vocabulary,
    )  # fmt: skip


def policy_case(tokens: int) -> Case:
    options = {"dual_clip": 3.0, "kl_coefficient": 0.1}

    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        return (ppo_loss(*x[:3], reference_logprob=x[3], **options).loss,)

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        return (reference.ppo_loss(*x[:3], reference_logprob=x[3], **options)[0],)

    others = [random(tokens, grad=False, scale=0.1 + k) for k in range(3)]
    shape, leaves = f"N {tokens}, dual clip, k2", [random(tokens, scale=0.1)]
    # Forward reads 4 numbers and writes 2; backward reads 2 and writes 1.
    return Case("ppo_loss", shape, leaves, others, ours, {"reference": plain}, bytes=36.0 * tokens)


def critic_case(tokens: int, width: int, dtype: torch.dtype) -> Case:
    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        return (value_loss(*x).loss,)

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return (reference.value_loss(hidden.to(weight.dtype), weight, bias, *rest)[0],)

    leaves = [random(tokens, width, dtype=dtype), random(width, scale=width**-0.5), random(1)]
    others = [random(tokens, grad=False), random(tokens, grad=False, scale=2.0)]
    shape = f"N {tokens}, D {width}, {dtype}".replace("torch.", "")
    size = 2.0 * leaves[0].numel() * leaves[0].element_size()  # read once, its gradient written once
    return Case("value_loss", shape, leaves, others, ours, {"reference": plain}, bytes=size)


def gae_case(rows: int, tokens: int) -> Case:
    rewards, values, action, turn = (x.to(DEVICE) for x in conversation(rows, tokens, 200, 800))
    flags = flags_from(action, turn)

    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        return tb_gae(x[0], x[1], flags=x[4])

    def chunked(*x: Tensor) -> tuple[Tensor, ...]:
        return chunked_scan(*x[:4])

    others = [rewards, values, action, turn, flags]
    shape = f"B {rows}, T {tokens}, 200 of 1000 acted"
    baselines: dict[str, Step] = {"reference": chunked}
    return Case("tb_gae", shape, [], others, ours, baselines, bytes=17.0 * rows * tokens, compiles=False)


def delta_case(tokens: int, heads: int, channels: int, dtype: torch.dtype) -> Case:
    query, key = (F.normalize(random(1, tokens, heads, channels, grad=False), dim=-1).to(dtype) for _ in "qk")
    value, gate = random(1, tokens, heads, channels, dtype=dtype), random(1, tokens, heads, grad=False)
    leaves = [query.requires_grad_(), key.requires_grad_(), value]
    leaves += [F.logsigmoid(gate + 2).to(dtype).requires_grad_(), gate.sigmoid().to(dtype).requires_grad_()]

    def definition(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        state = value.new_zeros(1, heads, channels, channels)
        return recurrent(query * channels**-0.5, key, value, gate, beta, state)

    # In chunks of 64: per token and head, four products of 64 x K or V, three of K x V; backward twice as many.
    flops = 3 * 2.0 * tokens * heads * (4 * 64 * channels + 3 * channels**2)
    shape = f"T {tokens}, H {heads}, K = V = {channels}, {dtype}".replace("torch.", "")
    baselines: dict[str, Step] = {"reference": definition}
    return Case("gated_delta_rule", shape, leaves, [], gated_delta_rule, baselines, flops=flops, compiles=False)


def layer_cases(tokens: int, width: int, dtype: torch.dtype) -> list[Case]:
    """The trainer's own `rms_norm`, `rope` and `swiglu`, in plain torch, beside torch's."""

    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (model.rms_norm(x, model.norm_weights(weight, 1e-6)),)

    def torch_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.rms_norm(x, (width,), weight, 1e-6),)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return (model.rotate(x, cos, sin),)

    def plain_turn(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        first, second = x.chunk(2, -1)
        return (x * cos + torch.cat((second, first), -1) * sin,)

    def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (model.swiglu(gate, up),)

    def plain_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (F.silu(gate) * up,)

    angle = random(tokens, 32, grad=False)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    x, weight = random(tokens, width, dtype=dtype), random(width, dtype=dtype)
    heads, gates = random(width // 64, tokens, 64, dtype=dtype), [random(tokens, width, dtype=dtype) for _ in range(2)]
    size, shape = 1.0 * x.numel() * x.element_size(), f"N {tokens}, D {width}, {dtype}".replace("torch.", "")
    return [
        Case("rms_norm (trainer)", shape, [x, weight], [], norm, {"reference": torch_norm}, bytes=5 * size),
        Case("rope (trainer)", shape, [heads], [cos, sin], turn, {"reference": plain_turn}, bytes=4 * size),
        Case("swiglu (trainer)", shape, gates, [], swiglu, {"reference": plain_swiglu}, bytes=8 * size),
    ]


def cases(quick: bool) -> list[tuple[Case, Case]]:
    """(small case for the check, case to time)."""
    small = [head_case(40, 16, 300, torch.float32), policy_case(300), critic_case(40, 96, torch.float32)]
    small += [gae_case(3, 3000), delta_case(100, 2, 16, torch.float32), *layer_cases(40, 128, torch.float32)]
    if CUDA and not quick:
        half = torch.bfloat16
        full = [[head_case(8192, 5120, 151936, half), head_case(32768, 5120, 248320, half)], [policy_case(1 << 20)]]
        full += [[critic_case(32768, 5120, half)], [gae_case(512, 4096), gae_case(64, 32768), gae_case(8, 131072)]]
        full += [[delta_case(4096, 16, 128, half)], *([case] for case in layer_cases(32768, 5120, half))]
    else:
        full = [[head_case(2048, 256, 8192, torch.float32)], [policy_case(1 << 18)]]
        full += [[critic_case(8192, 1024, torch.float32)], [gae_case(8, 4096), gae_case(4, 131072)]]
        full += [[delta_case(512, 4, 64, torch.float32)]]
        full += [[case] for case in layer_cases(8192, 1024, torch.float32)]
    return [(gate, case) for gate, group in zip(small, full, strict=True) for case in group]


def check(case: Case) -> None:
    """Our values and gradients against the reference in float64."""
    wide = Case(
        case.op, case.shape, [x.detach().double().requires_grad_() for x in case.leaves],
        [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.others],
        case.ours, case.baselines,
    )  # fmt: skip
    ours, wanted = case.run(case.ours), wide.run(case.baselines["reference"])
    for a, b in zip(ours, wanted, strict=True):
        apart = (a.detach().double() - b.detach()).abs().max()
        error = float(apart / b.detach().abs().max().clamp(min=1e-6))
        if not error < 1e-3:
            raise SystemExit(f"{case.op} is off by {error:.3g} of its largest number: no times are shown")


def timed(run: Callable[[], Any], budget: float, most: int = 30) -> tuple[float, float]:
    """Median (wall, device) milliseconds; on a CPU the second is this thread's own time."""
    run()
    flush = torch.empty(256 << 20 if CUDA else 0, dtype=torch.int8, device=DEVICE)
    samples: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(samples) < 2 or (len(samples) < most and time.perf_counter() - begun < budget):
        if CUDA:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda.synchronize()
            wall = time.perf_counter()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            samples.append((1e3 * (time.perf_counter() - wall), start.elapsed_time(stop)))
        else:
            wall, own = time.perf_counter(), time.thread_time()
            run()
            samples.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - own)))
    walls, own_times = zip(*samples, strict=True)
    return statistics.median(walls), statistics.median(own_times)


def resident(key: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise AssertionError(key)


def peak_memory(run: Callable[[], Any]) -> float:
    """MiB above what was held before."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back, so that what is used again counts again
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    run()
    return max(0.0, resident("VmHWM") - before)


def speeds() -> tuple[float, float]:
    """(bytes a second of a plain copy, FLOP a second of a plain matrix product) of this device."""
    source = torch.ones(1 << (28 if CUDA else 24), device=DEVICE)
    target = torch.empty_like(source)
    copied = 2.0 * source.numel() * 4 / (timed(lambda: target.copy_(source), 1.0)[1] / 1e3)
    size = 8192 if CUDA else 1024
    square = torch.ones(size, size, device=DEVICE, dtype=torch.bfloat16 if CUDA else torch.float32)
    return copied, 2.0 * size**3 / (timed(lambda: square @ square, 1.0)[1] / 1e3)


def measure(case: Case, budget: float) -> dict[str, dict[str, float] | None]:
    """Times and memory of ours and the baselines; None for one that runs out of memory."""
    steps: dict[str, Step] = {"ours": case.ours, **case.baselines}
    if case.compiles:
        steps["compiled"] = torch.compile(case.baselines["reference"], dynamic=False)
    found: dict[str, dict[str, float] | None] = {}
    for name, step in steps.items():
        try:
            wall, own = timed(lambda step=step: case.run(step), budget)
            memory = peak_memory(lambda step=step: case.run(step))
            found[name] = {"wall_ms": wall, "own_ms": own, "peak_mib": memory}
        except torch.OutOfMemoryError:
            found[name] = None
        if CUDA:
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes and short timings")
    options = parser.parse_args()
    if not CUDA:
        torch.set_num_threads(1)
        model.keep_freed_memory()  # as in training
    bandwidth, rate = speeds()
    card = torch.cuda.get_device_name() if CUDA else "CPU, one thread"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "date": str(datetime.date.today())}
    if find_spec("triton"):
        import triton

        versions["triton"] = triton.__version__
    print(f"{card}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"plain copy {bandwidth / 1e9:.0f} GB/s, plain matrix product {rate / 1e12:.2f} TFLOP/s")
    print("ms: device (wall) on a GPU, own (wall) on a CPU; MiB above the inputs\n")
    print(
        "| op | shape | floor | ours | reference | compiled | liger | MiB ours | MiB reference |"
        + "\n"
        + "|---" * 9
        + "|"
    )
    table = []
    for gate, case in cases(options.quick):
        check(gate)
        found = measure(case, 0.5 if options.quick else 2.0)
        floor = 1e3 * max(case.bytes / bandwidth, case.flops / rate)
        cells = [f"{x['own_ms']:.3g} ({x['wall_ms']:.3g})" if x else "–" for x in
                 (found.get(name) for name in ("ours", "reference", "compiled", "liger"))]  # fmt: skip
        memory = [f"{x['peak_mib']:.0f}" if x else "–" for x in (found.get(name) for name in ("ours", "reference"))]
        print(f"| {case.op} | {case.shape} | {floor:.3g} | " + " | ".join(cells + memory) + " |", flush=True)
        table.append({"op": case.op, "shape": case.shape, "floor_ms": floor, **found})
    print()
    print(json.dumps({"kernels": table, "card": card, **versions}))


if __name__ == "__main__":
    main()
