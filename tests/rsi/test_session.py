"""Task pools, the run folder, and which attempts a step may learn from."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rsi_sandbox import open_backend
from torch import nn

from rsi import distributed
from rsi.checkpoint import PARTIAL, Progress, open_run, read_config
from rsi.config import UserError, parse
from rsi.guards import CannotGoOn
from rsi.rpr import draw
from rsi.session import check_backend, load_pool, prepare_tasks, require_sound
from rsi.stages import schedule
from rsi.trajectory import Trajectory, read, to_json


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return ["--preset", "smoke", "--runs", str(tmp_path / "runs")]


def test_built_in_tasks_are_written_once_and_disjoint(arguments: list[str]) -> None:
    config = parse([*arguments, "--train-tasks", "6", "--evaluate.tasks", "4"])
    train, evaluation = prepare_tasks(config)
    assert [len(tasks) for tasks in train.values()] == [6] * 4
    assert [len(tasks) for tasks in evaluation.values()] == [4] * 4
    names = [{task.name for tasks in pool.values() for task in tasks} for pool in (train, evaluation)]
    assert not names[0] & names[1] and prepare_tasks(config) == (train, evaluation)
    other, same = prepare_tasks(parse([*arguments, "--seed", "1", "--train-tasks", "6", "--evaluate.tasks", "4"]))
    assert {task.name for tasks in same.values() for task in tasks} == names[1], "every run is measured alike"
    assert {task.name for tasks in other.values() for task in tasks} != names[0]


def test_what_a_pool_refuses(arguments: list[str]) -> None:
    config = parse([*arguments, "--train-tasks", "6"])
    train, _ = prepare_tasks(config)
    folder = config.folder / "tasks" / "train"
    first, second = (task.folder for task in train["core"][:2])
    with open_backend("local", "test-session") as backend:
        check_backend(backend, train)
        dockerfile = first / "environment" / "Dockerfile"
        dockerfile.write_text(dockerfile.read_text() + "RUN apt-get update\n")
        with pytest.raises(UserError, match=r"RUN.*--sandbox docker"):
            check_backend(backend, load_pool(folder))
    (first / "task.toml").write_text((second / "task.toml").read_text())
    with pytest.raises(UserError, match="both called"):
        load_pool(folder)
    (first / "steps" / "one").mkdir(parents=True)
    for name in ("instruction.md", "tests"):
        (first / name).rename(first / "steps" / "one" / name)
    (first / "task.toml").write_text('[[steps]]\nname = "one"\n')
    with pytest.raises(UserError, match=rf"{first} has .*steps.*make each a task"):
        load_pool(folder)
    (first / "task.toml").unlink()
    with pytest.raises(UserError, match=rf"{first}/task\.toml"):
        load_pool(folder)
    shutil.rmtree(first)
    shutil.rmtree(folder / "swr")
    with pytest.raises(UserError, match="swr holds no task folder"):
        load_pool(folder)


def test_every_task_is_drawn_once_an_epoch_and_suites_alike(arguments: list[str]) -> None:
    train, _ = prepare_tasks(parse([*arguments, "--train-tasks", "6"]))
    steps = [draw(train, ("core", "swr"), 4, step, seed=1) for step in range(3)]
    assert [[task.suite for task in tasks] for tasks in steps] == [["core", "core", "swr", "swr"]] * 3
    assert {task.name for tasks in steps for task in tasks if task.suite == "swr"} == {t.name for t in train["swr"]}
    assert steps == [draw(train, ("core", "swr"), 4, step, seed=1) for step in range(3)]


def test_a_killed_try_leaves_nothing_behind(arguments: list[str]) -> None:
    config = parse(arguments)
    run = open_run(config)
    base, rsr1 = schedule(config)[:2]
    run.begin(base)
    run.finish(base, {"stage": "base"})
    assert run.done() == {"base"}
    assert read_config(run.folder) == dataclasses.replace(config, name="smoke-0")
    run.begin(rsr1)
    attempts = run.folder / "trajectories" / "rsr1" / "discovery.jsonl"
    attempts.parent.mkdir(parents=True)
    attempts.write_text("{}\n")
    lines = [json.dumps({"stage": stage, "step": 1}) for stage in ("base", "rsr1")]
    (run.folder / "metrics.jsonl").write_text("damaged\n" + lines[0] + "\n" + lines[1] + "\n" + lines[1][:5])
    assert run.done() == {"base"}
    partial = run.begin(rsr1)
    assert partial.name.endswith(PARTIAL) and not list(partial.iterdir()) and not attempts.exists()
    assert (run.folder / "metrics.jsonl").read_text() == "damaged\n" + lines[0] + "\n"


def test_a_run_folder_has_one_owner(arguments: list[str]) -> None:
    config = parse(arguments)
    run = open_run(config)
    with pytest.raises(UserError, match="in use"):
        open_run(config)
    run.lock.close()
    open_run(config)


def test_damaged_files_are_named(arguments: list[str]) -> None:
    config = parse(arguments)
    run = open_run(config)
    run.begin(schedule(config)[0])
    run.finish(schedule(config)[0], {"stage": "base"})
    assert run.lock
    run.lock.close()
    for path, use in (
        (run.path("base") / "stage.json", run.write_stages),
        (run.folder / "config.json", lambda: open_run(config)),
    ):
        path.write_text(path.read_text()[:-3])
        with pytest.raises(UserError, match=f"{path} cannot be read .*restore it, or delete {path.parent}"):
            use()
    attempts = run.folder / "kept.jsonl"
    attempts.write_text(to_json(Trajectory("a", "f", "core", "terminus", 1)) + "\n{}\n")
    with pytest.raises(UserError, match=f"{attempts}, line 2 cannot be read"):
        list(read(attempts))
    path.write_text("[]")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        open_run(config)


def test_more_rounds_may_follow_but_not_fewer(arguments: list[str]) -> None:
    for rounds, held in (("2", 2), ("3", 3)):
        run = open_run(parse([*arguments, "--rounds", rounds]))
        assert run.lock and read_config(run.folder).rounds == held
        run.lock.close()
    with pytest.raises(UserError, match=r"rounds \(3 → 2\)"):
        open_run(parse(arguments))


def test_lines_of_a_stage_that_ran_since_outlive_a_cut(arguments: list[str]) -> None:
    run = open_run(parse(arguments))
    rsr1, rpr1 = schedule(run.config)[1:3]
    metrics = run.folder / "metrics.jsonl"
    lines = {name: json.dumps({"stage": name, "step": 1}) + "\n" for name in ("rsr1", "rpr1")}
    metrics.write_text(lines["rsr1"])
    Progress.of(run, "rsr1", run.begin(rsr1)).save(0)
    assert metrics.read_text() == ""  # nothing was saved of this stage before, so its line went
    metrics.write_text(lines["rpr1"] + lines["rsr1"] + lines["rpr1"])
    run.begin(rsr1)
    assert metrics.read_text() == lines["rpr1"] * 2
    run.begin(rpr1)
    assert metrics.read_text() == ""


def test_saving_changes_no_training(arguments: list[str]) -> None:
    distributed.start()
    run = open_run(parse(arguments))
    results = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, (0.9, 0.98))
        parts = {"model": (model, [optimizer])}
        progress = Progress.of(run, "rsr1", run.begin(schedule(run.config)[1]))
        if saves:
            for position in (1, 2, 3):
                progress.save(position, parts)
            progress.flush()
            assert sorted(path.name for path in progress.folder.glob("[0-9]*")) == ["000002", "000003"]
            with torch.no_grad():
                model.weight.zero_()
            assert progress.load(parts) == 3
        for _ in range(2):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        results.append(model.weight.detach().clone())
    distributed.stop()
    assert torch.equal(*results)


FULL = """
mount -t tmpfs -o size=2m none "$1"; cd "$1"; shift
"$@"; echo "status $?"
rm runs/smoke-0/log.txt; dd if=/dev/zero of=rest bs=1k 2>/dev/null
"$@"; echo "status $?"
mv runs/smoke-0 runs/other; "$@" 2>&1; echo "status $?"; mv runs/other runs/smoke-0
mount -o remount,size=64m none .
"$@" >/dev/null; echo "status $?"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """A checkpoint that does not fit, then not one byte that does, for the log or a new run; then room again."""
    train = "--preset smoke --pretrain.steps 20 --stage base --train-tasks 4 --evaluate.tasks 1"
    command = ["unshare", "-m", "bash", "-c", FULL, "-", str(tmp_path), sys.executable, "-m", "rsi.train"]
    done = subprocess.run([*command, *train.split()], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(("rsi: error", "status"))]
    assert [line for line in found if "status" in line] == ["status 1", "status 1", "status 2", "status 0"], found
    (first, *others) = [line for line in found if "error" in line]
    assert "cannot be saved" in first and len(others) == 2 and all("No space left" in line for line in others)
    assert "Traceback" not in done.stderr


def test_a_step_none_of_whose_attempts_says_anything_ends_the_run() -> None:
    full, spoke = (Trajectory("task", "family", "core", "terminus", number, end="length") for number in range(2))
    for record in (full, spoke):
        record.extend([1, 2, 3])
    with pytest.raises(CannotGoOn, match=r"rpr1 joint step 1: no attempt .*--rollout\.max-length"):
        require_sound("rpr1 joint step 1", [full])
    spoke.extend([4], 0, [-1.0])
    assert require_sound("rpr1 joint step 1", [full, spoke]) == [full, spoke]
