"""Built-in tasks, judged by the real verifier in the local sandbox: solution, no-op and every habit."""

import random
import re
from collections import Counter

import pytest
from rsi_sandbox import load_task, open_backend, verify

from rsi.leakage import screen
from rsi.tiny.checks import passes
from rsi.tiny.shell import Unsupported, World
from rsi.tiny.tasks import FAMILIES, draw, generate, split_of, write_task
from rsi.tiny.transcripts import act
from rsi.tiny.words import KEYS, WORDS
from rsi.trajectory import Exchange

MEMBERS = [(family, suite) for suite, families in FAMILIES.items() for family in families]


class Rates(dict):
    """The same rate for every kind."""

    def __missing__(self, kind):
        return 1.0


@pytest.fixture(scope="module")
def backend():
    with open_backend("local", "test-tiny") as opened:
        yield opened


def drawn(family, suite, count, seed=0, split="train"):
    rng = random.Random(seed)
    return [draw(family, suite, rng, split) for _ in range(count)]


def graded(backend, task, commands=()):
    sandbox = backend.start(task)
    for command in commands:
        sandbox.run(command)
    return verify(backend, task, sandbox)


@pytest.mark.parametrize(("family", "suite"), MEMBERS)
def test_solution_passes_all_and_a_no_op_none(backend, tmp_path, family, suite):
    kinds = set()
    for number, spec in enumerate(drawn(family, suite, 12)):
        if spec.composition in kinds:
            continue
        kinds.add(spec.composition)
        write_task(spec, tmp_path / str(number))
        task = load_task(tmp_path / str(number))
        assert (task.family, task.suite, task.checks) == (family, suite, len(spec.checks))
        solved = graded(backend, task, [spec.solution])
        assert solved.strict and solved.reward == 1 and tuple(solved.checks) == spec.checks, (spec, solved)
        idle = graded(backend, task)
        assert idle.reward == 0 and tuple(idle.checks) == spec.checks and not any(idle.checks.values())


@pytest.mark.parametrize(("family", "suite"), MEMBERS)
def test_the_natural_commands_solve_it_and_each_habit_alone_does_not(backend, tmp_path, family, suite):
    """The sandbox' verdict on every check equals the one decided in memory."""
    for number, spec in enumerate(drawn(family, suite, 6, seed=1)):
        write_task(spec, tmp_path / str(number))
        task = load_task(tmp_path / str(number))
        points = [place for place, step in enumerate(spec.steps) if step.habit]
        for wrong in (None, *points):
            steps = tuple(
                step._replace(habit="") if place != wrong else step._replace(right=step.habit, habit="")
                for place, step in enumerate(spec.steps)
            )
            attempt = act(steps, World(spec.files), Rates(), 0.0, random.Random(0))
            verdict = graded(backend, task, attempt.commands)
            assert verdict.checks == {check.name: passes(check, attempt.world) for check in spec.criteria}
            assert verdict.strict == (wrong is None), (spec.instruction, attempt.commands)


def test_a_flow_that_exits_or_hangs_is_bounded_and_fails_alone(backend, tmp_path):
    spec = drawn("fields", "swr", 1)[0]
    write_task(spec, tmp_path / "task")
    task = load_task(tmp_path / "task")
    scripts = [found for step in spec.steps if (found := re.search(r"'(.*)' > (\S+)", step.right))]
    exits = [f"printf '%s; exit 0\\n' '{script[1]}' > {script[2]}" for script in scripts]
    assert len(exits) == 2 and graded(backend, task, exits).strict
    assert not graded(backend, task, [exits[0], f"echo 'sleep 60' > {scripts[1][2]}"]).strict


def test_what_looks_right_but_is_not(backend, tmp_path):
    """A missing last newline, a NUL at the end, a link in the place of a file."""
    spec = next(spec for spec in generate("train", "core", 40, 0) if spec.composition == ("sort",))
    write_task(spec, tmp_path / "task")
    task = load_task(tmp_path / "task")
    right = spec.steps[0].right
    target = right.rpartition(" ")[2]
    assert graded(backend, task, [right]).strict
    link = f"mv {target} other; ln -s other {target}"
    for spoil in (f"truncate -s -1 {target}", f"printf '\\0' >> {target}", link):
        assert not graded(backend, task, [right, spoil]).strict, spoil


def test_splits_are_disjoint_and_hold_no_duplicates():
    for suite in FAMILIES:
        sets = {split: generate(split, suite, 60, 5) for split in ("train", "eval", "published")}
        keys = {
            split: {(spec.family, spec.instruction, tuple(sorted(spec.files.items()))) for spec in specs}
            for split, specs in sets.items()
        }
        assert all(len(keys[split]) == 60 for split in sets)
        assert not keys["train"] & keys["eval"] and not keys["train"] & keys["published"]
        assert not keys["eval"] & keys["published"]
        assert all(split_of(spec) == split for split, specs in sets.items() for spec in specs)
        assert Counter(spec.family for spec in sets["train"]).most_common()[-1][1] >= 60 // len(FAMILIES[suite])
        if suite in ("long", "swr"):
            compositions = {split: {spec.composition for spec in specs} for split, specs in sets.items()}
            assert not compositions["train"] & (compositions["eval"] | compositions["published"])


@pytest.mark.parametrize("family", FAMILIES["swr"])
def test_every_part_of_a_held_out_workflow_is_trained_on(family):
    parts = {split: set() for split in ("train", "eval")}
    for split, found in parts.items():
        for spec in drawn(family, "swr", 150, seed=2, split=split):
            found.update(enumerate(spec.composition))
    assert {part for _, part in parts["eval"]} <= {part for _, part in parts["train"]}
    assert len({part for _, part in parts["eval"]}) > 2


def test_the_same_seed_gives_the_same_tasks():
    for suite in FAMILIES:
        first, again, other = (generate("train", suite, 20, seed) for seed in (3, 3, 4))
        assert first == again and [spec.tests for spec in first] == [spec.tests for spec in again]
        assert first != other


def test_checks_steps_and_names_are_within_bounds():
    sizes = set()
    for suite, low, high in (("core", 1, 2), ("hard", 3, 6), ("long", 6, 12), ("swr", 2, 5)):
        for spec in generate("train", suite, 150, 0):
            sizes.add(len(spec.checks))
            assert low <= len(spec.checks) <= high and len(set(spec.checks)) == len(spec.checks)
            assert 1 <= len(spec.steps) <= 7
            assert not set(spec.hidden) & set(re.findall(r"[\w-]+", spec.instruction))
            if suite == "long":
                assert len(spec.hidden) >= 2
                assert 1 <= sum(bool(step.habit) for step in spec.steps) <= 3
            names = {part for path in spec.files for part in re.split(r"[/.]", path)}
            assert names <= {*WORDS, "README", "md", "txt", "conf", "log", "tmp", "sh", "in", "out"}
    assert min(sizes) == 1 and max(sizes) >= 10


def test_words_are_a_closed_list_without_repeats_or_parts_of_each_other():
    assert 180 <= len(WORDS) <= 220 and len({*WORDS, *KEYS}) == len(WORDS) + len(KEYS)
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]


def test_an_unknown_split_or_suite_is_the_users_mistake():
    with pytest.raises(ValueError, match="choose train"):
        generate("test", "core", 1, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose one of"):
        generate("train", "medium", 1, 0)


@pytest.mark.parametrize(("family", "suite"), MEMBERS)
def test_an_honest_attempt_is_never_screened_out(family, suite):
    for spec in drawn(family, suite, 40, seed=7):
        steps = tuple(step._replace(habit="") for step in spec.steps)
        try:
            attempt = act(steps, World(spec.files), Rates(), 0.0, random.Random(0))
        except Unsupported:
            pytest.fail(spec.instruction)
        exchanges = [Exchange((c,), o.output) for c, o in zip(attempt.commands, attempt.outcomes, strict=True)]
        tests, solution = {"test.sh": spec.tests}, {"solve.sh": spec.solution}
        assert screen(exchanges, spec.instruction, spec.files, tests, solution, None, ("submit",)) is None, spec
