"""The command line: what it accepts, and the one line it answers a mistake with."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rsi.config import GROUPS, Config, UserError, differences, parse, to_record
from rsi.presets import smoke


def test_defaults_presets_and_nested_options() -> None:
    assert parse([]) == Config()
    assert parse(["--preset", "smoke"]) == smoke()
    assert parse(["--preset=smoke", "--seed", "3"]).folder == Path("runs/smoke-3")
    assert parse(["--rpr.actor-lr", "1e-4", "--rpr.steps", "3", "4"]).rpr.steps == (3, 4)
    assert parse(["--evaluate.no-greedy"]).evaluate.greedy is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "tny"], ["--preset 'tny'", "tiny, smoke"]),
        (["--preset"], ["--preset ''"]),
        (["--stge", "rpr1"], ["--stge", "--stage"]),
        (["--seed", "x"], ["--seed: invalid literal for int() with base 10: 'x' (see "]),
        (["--stage", "rpr9"], ["--stage 'rpr9'", "rpr2"]),
        (["--rpr.actor_l", "2"], ["--rpr.actor_l", "--rpr.actor-lr"]),
        (["--model.layers", "0"], ["--model.layers 0", "at least 1"]),
        (["--rpr.spr-failure", "1"], ["--rpr.spr-failure 1.0", "[0, 1)"]),
        (["--rpr.attempts", "-3"], ["--rpr.attempts -3"]),
        (["--rollout.temperature", "0"], ["--rollout.temperature 0.0"]),
        (["--rsr.harnesses", "tmux"], ["--rsr.harnesses tmux", "terminus, bash or rsrt"]),
        (["--rsr.harnesses", "bash", "bash"], ["--rsr.harnesses bash bash", "each once"]),
        (["--rpr.steps", "3", "-1"], ["--rpr.steps -1", "at least 0"]),
        (["--rounds", "10000000000"], ["--rounds 10000000000", "within [1, 1000]"]),
        (["--families", "0"], ["--families 0", "at least 1"]),
        (["--rpr.dual-clip", "1"], ["--rpr.dual-clip 1.0", "within (1, inf)"]),
        (["--timeout", "inf"], ["--timeout inf", "within (0, 1e6]"]),
        (["--rpr.gamma", "1.01"], ["--rpr.gamma 1.01", "within [0, 1]"]),
        (["--rollout.slots", "100000000"], ["--rollout.slots 100000000", "within [1, 65536]"]),
        (["--name", ".."], ["--name '..'", "one folder"]),
        (["--name", "a/b"], ["--name 'a/b'", "one folder"]),
        (["--preset", "tiny", "--preset", "tny"], ["--preset 'tny'"]),
        (["--ranks", "2"], ["--ranks 2", "torchrun --nproc-per-node 2"]),
        (["--init", "x", "--model.layers", "3"], ["--model has no effect with --init"]),
        (["--tasks", ".", "--train-tasks", "3"], ["--train-tasks has no effect with --tasks"]),
        (["--sandbox", "chroot"], ["--sandbox", "chroot"]),
        (["--tasks", "nowhere"], ["--tasks nowhere", "no such folder"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def number_options() -> list[str]:
    """Every option that takes a number, as it is written."""
    groups = {"": Config(), **{f"{name}.": getattr(Config(), name) for name in GROUPS}}
    return [
        f"--{prefix}{entry.name}".replace("_", "-")
        for prefix, group in groups.items()
        for entry in dataclasses.fields(group)
        if entry.type in (int, float, int | None, float | None, tuple[int, ...])
    ]


@pytest.mark.parametrize("option", number_options())
def test_no_number_is_taken_that_cannot_work(option: str) -> None:
    for value in ("nan", "-inf", "-1"):
        if (option, value) != ("--seed", "-1"):
            with pytest.raises(UserError, match=option):
                parse([option, value])


def test_what_means_no_limit_is_taken() -> None:
    rpr = parse(["--rpr.clip-high", "inf", "--rpr.value-clip", "inf", "--rpr.max-grad-norm", "inf"]).rpr
    assert rpr.clip_high == rpr.value_clip == rpr.max_grad_norm == math.inf


def test_of_several_presets_the_last_counts() -> None:
    assert parse(["--preset", "tiny", "--preset=smoke"]) == smoke()


def test_the_process_prints_that_line_alone() -> None:
    command = [sys.executable, "-m", "rsi.train", "--sede", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("rsi: error: ") and done.stderr.count("\n") == 1 and "--seed" in done.stderr


def test_only_the_first_rank_speaks() -> None:
    import os

    command = [sys.executable, "-m", "rsi.train", "--sede", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "RANK": "1"})
    assert done.returncode == 2 and done.stdout + done.stderr == ""


def test_differences_name_the_keys_and_ignore_where_to_stop() -> None:
    old = to_record(parse([]))
    free = ["--stage", "rpr1", "--timeout", "3", "--rollout.timeout", "9", "--rank-gib", "1"]
    new = to_record(parse([*free, "--rpr.gamma", "0.9", "--seed", "4"]))
    assert differences(old, new) == ["rpr.gamma (0.99 → 0.9)", "seed (0 → 4)"]
