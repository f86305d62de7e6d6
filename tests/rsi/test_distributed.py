"""Several processes: the same training as in one, whatever the layout."""

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import FAMILIES, perturbed

from rsi import distributed
from rsi.config import parse
from rsi.model import Transformer
from rsi.trajectory import read

PROGRAMS = Path(__file__).parent / "programs"
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))  # before conftest.py hides them


def torchrun(ranks: int, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` processes of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launch, *command], capture_output=True, text=True, check=False, timeout=280, env=os.environ | environment
    )


def layout(out: Path, ranks: int, model: str, *options: str, **environment: str) -> dict[str, Any]:
    out.mkdir()
    done = torchrun(ranks, str(PROGRAMS / "layout.py"), str(out), model, *options, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(out / "result.pt", weights_only=True, map_location="cpu")
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two sets of tensors lie apart, in parts of the first one's norm."""
    assert len(one) > 10 and one.keys() == other.keys()
    sides = [torch.cat([side[name].flatten() for name in one]).double() for side in (one, other)]
    return float(torch.linalg.vector_norm(sides[0] - sides[1]) / torch.linalg.vector_norm(sides[0]))


# Of 64 tokens most attempts are a micro-batch of their own, and some are longer than that.
SPLIT, ALL = ("--micro-batch-tokens", "64"), ("--micro-batch-tokens", "100000")


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("tied", [(1, *SPLIT, "--recompute"), (2, *SPLIT), (3, *ALL)]),
        ("untied", [(2, "--recompute", "--offload")]),
        ("hybrid", [(2, *SPLIT, "--recompute")]),
    ],
)
def test_ranks_and_micro_batches_change_nothing(tmp_path: Path, model: str, layouts: list[tuple[int, str]]) -> None:
    one = layout(tmp_path / "one", 1, model)
    for number, (ranks, *options) in enumerate(layouts):
        other = layout(tmp_path / str(number), ranks, model, *options)
        for network in ("actor", "critic"):
            assert apart(one[network], other[network]) <= 1e-6, number
            for name, before in one[network].items():
                difference = torch.linalg.vector_norm(before - other[network][name])
                assert difference <= 1e-5 * torch.linalg.vector_norm(before), (number, name)
        assert len(one["gradients"]) > 30 and apart(one["gradients"], other["gradients"]) <= 1e-5, number
        for before, after in zip(one["metrics"], other["metrics"], strict=True):
            assert before.keys() == after.keys()
            for key in before:
                assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6), (number, key)


@pytest.mark.skipif(not GPUS, reason="no GPU")
@pytest.mark.parametrize("model", ["tied", "hybrid"])
def test_gpus_train_as_the_cpu_does(tmp_path: Path, model: str) -> None:
    """Other kernels and NCCL: as near as float32 sums of another order stay after nine steps of Adam."""
    one = layout(tmp_path / "cpu", 1, model)
    for number, options in enumerate([(), (*SPLIT, "--recompute", "--offload")]):
        other = layout(tmp_path / str(number), GPUS, model, *options, CUDA_VISIBLE_DEVICES=VISIBLE)
        for part in ("actor", "critic", "gradients"):
            assert apart(one[part], other[part]) <= 1e-3, (number, part)


def command(runs: Path, *options: str) -> list[str]:
    """A short run with more attempts than slots."""
    short = "--preset smoke --pretrain.steps 20 --train-tasks 8 --rsr.tasks 4 --rpr.steps 2 --rpr.attempts 6"
    short += " --rollout.slots 4 --evaluate.tasks 3 --save-every 1 --threads 1 --stage rpr1"  # as many on any node
    return ["-m", "rsi.train", *short.split(), "--runs", str(runs), *options]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks, never interrupted."""
    runs = tmp_path_factory.mktemp("runs")
    done = torchrun(2, *command(runs))
    assert done.returncode == 0, done.stderr
    return runs / "smoke-0"


def test_the_command_runs_on_two_ranks_with_more_attempts_than_slots(run: Path) -> None:
    records = json.loads((run / "stages.json").read_text())
    assert [record["stage"] for record in records] == ["base", "rsr1", "rpr1"]
    attempts = sorted((run / "trajectories" / "base").glob("evaluation.*.jsonl"))
    assert [path.name for path in attempts] == ["evaluation.0.jsonl", "evaluation.1.jsonl"]
    assert sum(len(path.read_text().splitlines()) for path in attempts) == 12
    again = torchrun(2, *command(run.parent, "--rpr.gamma", "0.5"))
    assert again.returncode == 1 and again.stderr.count("holds a run with another configuration") == 1


def on_nodes(nodes: int) -> list[str]:
    """torchrun's options for two processes on one node, or on each of two one."""
    if nodes == 1:
        return ["--standalone", "--nproc-per-node", "2"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]


@contextmanager
def interrupted(
    run: Path, runs: Path, *options: str, nodes: int = 1
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[str]]]:
    """The same run started anew from its stage rpr1, when that stage's first step is done; what it prints after."""
    shutil.copytree(run, runs / run.name, ignore=shutil.ignore_patterns("2-rpr1", "rpr1"))
    metrics = runs / run.name / "metrics.jsonl"
    before = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["stage"] != "rpr1"]
    metrics.write_text("".join(before))
    launch = [sys.executable, "-m", "torch.distributed.run", *on_nodes(nodes), *options, *command(runs)]
    rest: list[str] = []
    reading, writing = os.pipe()
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [subprocess.Popen(launch, stdout=writing, env=environment) for _ in range(nodes)]
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as output:
        for line in output:
            if line.startswith("rpr1 warmup 1"):
                break
        yield agents, rest
        rest += output
    for agent in agents:
        agent.wait(60)


def same(run: Path, other: Path) -> bool:
    """Whether stage records, metrics, attempts and weights are the same, the clock apart."""
    kill = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "kill.py"))
    differences: list[str] = kill["differences"](kill["outcome"](run), kill["outcome"](other))
    return not differences


def test_torchrun_passes_a_stop_on_and_the_same_command_goes_on(run: Path, tmp_path: Path) -> None:
    with interrupted(run, tmp_path) as ([agent], rest):
        agent.send_signal(signal.SIGINT)
    assert "stopped as asked" in "".join(rest) and not any(line.startswith("rpr1 joint") for line in rest)
    saved = json.loads((tmp_path / run.name / "stages" / "2-rpr1.partial" / "state" / "progress.json").read_text())
    assert saved["position"] >= 1
    shutil.copytree(tmp_path / run.name, tmp_path / "alone" / run.name)
    assert torchrun(2, *command(tmp_path)).returncode == 0
    assert same(run, tmp_path / run.name)
    assert torchrun(1, *command(tmp_path / "alone")).returncode == 0
    assert_alike(run, tmp_path / "alone" / run.name)


def assert_alike(run: Path, other: Path) -> None:
    """The same attempts, and up to rounding the same weights: the numbers of ranks differ."""
    attempts = [sorted((folder / "trajectories" / "rpr1").glob("[cj]*.jsonl")) for folder in (run, other)]
    ids = [sorted((record.seed, record.ids) for path in paths for record in read(path)) for paths in attempts]
    assert ids[0] == ids[1] and len(ids[0]) == 6 * (4 + 2)
    for network in ("actor", "critic"):
        places = [folder / "stages" / "2-rpr1" / network / "model.safetensors" for folder in (run, other)]
        one, two = (torch.cat([tensor.flatten() for _, tensor in sorted(load_file(x).items())]) for x in places)
        assert torch.linalg.vector_norm(one - two) <= 1e-5 * torch.linalg.vector_norm(one)


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_restarts_what_was_killed(run: Path, tmp_path: Path, nodes: int) -> None:
    with interrupted(run, tmp_path, "--max-restarts", "1", nodes=nodes) as (agents, rest):
        tasks = [Path(f"/proc/{agent.pid}/task/{agent.pid}/children") for agent in agents]
        children = [child for task in tasks for child in task.read_text().split()]
        (second,) = [child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
        os.kill(int(second), signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0] * nodes and sum("2 × cpu" in line for line in rest) == 1
    assert same(run, tmp_path / run.name)


def test_restarts_that_would_hang_on_several_nodes_are_refused(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", *on_nodes(2), "--max-restarts=1", *command(tmp_path)]
    agents = [subprocess.Popen(launch, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(agent.communicate(timeout=200)[1] for agent in agents)
    assert all(agent.returncode for agent in agents) and not list(tmp_path.iterdir())
    assert "rsi: error: torchrun --max-restarts on 2 nodes needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 set" in said


MISSING = """
import os, sys, time
from pathlib import Path
import torch
from rsi import distributed
from rsi.config import Config
from rsi.model import ModelConfig, Transformer

fifo, where, late, limit, *longer = sys.argv[1:]
distributed.start(float(limit))
actor = distributed.copy_of(Transformer(ModelConfig(61, 32, 64, 2, 4, 2, 8)), Transformer, Config())
ids = torch.ones(1, 4, dtype=torch.long)
distributed.meet("begin")
if distributed.rank() == int(late):
    Path(fifo).read_text()  # returns when the other rank has given up
else:
    begun = time.monotonic()
    try:
        if where == "meeting":
            distributed.meet("lunch", *map(float, longer))
        else:
            with distributed.naming_missing():
                actor(ids)
    except distributed.RankMissing as problem:
        print(f"{time.monotonic() - begun:.0f} s {problem}", flush=True)
    Path(fifo).write_text("")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("where", "late", "minutes", "said"),
    [
        ("meeting", "1", ["1", "0.1"], r"([6-9]|1\d) s lunch: .*[Rr]ank 1"),
        ("meeting", "0", ["0.1"], r"([6-9]|1\d) s lunch: .*from rank 0"),
        ("pass", "1", ["0.1"], r"1\d s all_gather\w* in \w+: .*[Rr]ank 1"),
    ],
)
def test_a_missing_rank_is_named_in_time(tmp_path: Path, where: str, late: str, minutes: list[str], said: str) -> None:
    (tmp_path / "missing.py").write_text(MISSING)
    os.mkfifo(tmp_path / "fifo")
    done = torchrun(2, str(tmp_path / "missing.py"), str(tmp_path / "fifo"), where, late, *minutes)
    assert re.match(said, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_sampler_has_the_precision_of_the_trainers_passes(family: str, recompute: bool) -> None:
    """Float32 weights, bfloat16 passes with decays in float32: what samples is the same, and its log-probs too."""
    distributed.start()
    try:
        config = parse(["--precision", "bfloat16", *(["--recompute"] if recompute else [])])
        plain = perturbed(FAMILIES[family])
        decays = [name for name, _ in plain.named_parameters() if name.endswith(("A_log", "dt_bias"))]
        actor = distributed.copy_of(plain, Transformer, config)
        ids_BT = torch.randint(96, (1, 40))
        for _ in range(2):  # what a pass leaves behind does not change the next
            trained = actor.logits(actor(ids_BT)[0]).log_softmax(-1)
            trained.square().sum().backward()
        copy = distributed.whole(actor, config)
        sampled = copy.logits(copy(ids_BT)[0]).log_softmax(-1)
        assert torch.equal(sampled, trained)
        assert {p.dtype for name, p in copy.named_parameters() if name not in decays} == {torch.bfloat16}
        assert {p.dtype for p in actor.parameters()} == {torch.float32}
        assert list(actor.state_dict()) == list(plain.state_dict())
        sampled.square().sum().backward()
        gradients = {name: tensor.grad for name, tensor in actor.state_dict(keep_vars=True).items()}
        for name in decays:
            assert torch.equal(copy.get_parameter(name), plain.get_parameter(name))
            torch.testing.assert_close(gradients[name].full_tensor(), 2 * copy.get_parameter(name).grad)
        exact = plain.logits(plain(ids_BT)[0]).log_softmax(-1)
        assert 1e-4 < (trained - exact).abs().max()
    finally:
        distributed.stop()
