"""Synthetic transcripts: deliberately imperfect attempts, written without running anything.

Commands and their outputs come from `rsi.tiny.shell`; turns and observations are rendered by the real
harnesses, so that what the base model reads in pretraining is what it reads in an attempt, token for token.
"""

import random
import re
from typing import NamedTuple

from rsi.chat import Message
from rsi.harness import NOT_SOLVED, Action, Harness, Outcome, get_harness
from rsi.runbook import plan as plan_runbook
from rsi.tiny import habits
from rsi.tiny.families import TaskSpec
from rsi.tiny.shell import Unsupported, World
from rsi.tiny.steps import Step
from rsi.trajectory import Exchange

NAME = re.compile(r"[a-z/]+\.[a-z]+")
HARNESSES = {name: get_harness(name, "brief") for name in ("terminus", "bash", "rsrt")}


class Line(NamedTuple):
    """One message of a transcript; `trained` ones are the assistant's."""

    role: str
    content: str
    trained: bool


class Attempt(NamedTuple):
    """The commands run and what each was for, what they printed with their exit codes, the files they left."""

    commands: list[str]
    plans: list[str]
    outcomes: list[Outcome]
    world: World


def transcript(
    spec: TaskSpec, harness: str, rng: random.Random, runbook: bool = False, habit: float = 1.0
) -> list[Line]:
    """The messages of one imperfect attempt at `spec`.

    In `rsrt` an attempt that failed is told so and done again from its first habit point. With `runbook`
    the prompt holds the runbook that `rsi.runbook` plans from the attempt's own commands, right or wrong.
    `habit` scales how often a habit wins: 1 as in `rsi.tiny.habits`, 0 never.
    """
    form = HARNESSES[harness]
    column = 1 if harness == "bash" else 0
    right = {kind: habits.RUNBOOK_RIGHT if runbook else rate[column] for kind, rate in habits.RIGHT.items()}
    rates = {kind: 1 - habit * (1 - rate) for kind, rate in right.items()}
    slip = habits.RUNBOOK_SLIP if runbook else habits.SLIP
    attempt = act(spec.steps, World(spec.files), rates, slip, rng)
    page = None
    if runbook:
        pairs = zip(attempt.commands, attempt.outcomes, strict=True)
        exchanges = [Exchange((command,), outcome.output) for command, outcome in pairs]
        page = plan_runbook(spec.instruction, exchanges)
    lines = [Line(role, content, False) for role, content in form.prompt(spec.instruction, page)]
    _render(lines, form, attempt)
    if harness == "rsrt" and not spec.solved(attempt.world):
        lines.append(Line("user", NOT_SOLVED, False))
        first = next((place for place, step in enumerate(spec.steps) if step.habit), 0)
        rates = dict.fromkeys(habits.RIGHT, 1 - habit * (1 - habits.REDO_RIGHT))
        _render(lines, form, act(spec.steps[first:], attempt.world, rates, slip, rng, attempt.outcomes[:first]))
    return lines


def act(
    steps: tuple[Step, ...],
    world: World,
    rates: dict[str, float],
    slip: float,
    rng: random.Random,
    before: list[Outcome] | None = None,
) -> Attempt:
    """Do the steps: at a habit point the right command with the kind's rate, and `slip` per step.

    `before` are outcomes that the first step may refer to. `world` is changed.
    """
    attempt = Attempt([], [], [], world)
    seen = before[-1].output if before else ""
    for step in steps:
        right = not step.habit or rng.random() < rates[step.kind]
        command = step.right if right else step.habit
        if "{" in command and not seen.strip():
            break  # what it refers to was not seen
        command = _refer(command, seen)
        if rng.random() < slip:
            if rng.random() < 0.5 and len(steps) > 1:
                continue
            command = _misname(command, steps, rng)
        try:
            trial = world.copy()
            outcome = trial.run(command)
        except Unsupported:
            command = _refer(step.right, seen)
            trial = world.copy()
            try:
                outcome = trial.run(command)
            except Unsupported:
                break  # an earlier command left nothing to go on with
        world.files, world.dirs, world.executable = trial.files, trial.dirs, trial.executable
        attempt.commands.append(command)
        attempt.plans.append(step.plan)
        attempt.outcomes.append(Outcome(outcome.output, outcome.code))
        seen = outcome.output
    return attempt


def draw_form(rng: random.Random) -> tuple[str, bool]:
    """A harness and whether a runbook comes with the prompt, by the shares in `rsi.tiny.habits`."""
    point = rng.random()
    if point < habits.TERMINUS_SHARE:
        return "terminus", point < habits.TERMINUS_SHARE * habits.RUNBOOK_SHARE
    return ("bash" if point < habits.TERMINUS_SHARE + habits.BASH_SHARE else "rsrt"), False


def messages(lines: list[Line]) -> tuple[list[Message], list[Line]]:
    """The prompt's messages, and the turns and observations after them."""
    start = next(place for place, line in enumerate(lines) if line.trained)
    return [Message(line.role, line.content) for line in lines[:start]], lines[start:]


def _render(lines: list[Line], form: Harness, attempt: Attempt) -> None:
    for command, plan, outcome in zip(attempt.commands, attempt.plans, attempt.outcomes, strict=True):
        lines.append(Line("assistant", form.write([command], False, plan), True))
        lines.append(Line("user", form.observe(Action((command,)), [outcome]), False))
    lines.append(Line("assistant", form.write([], True), True))


def _refer(command: str, seen: str) -> str:
    if "{" not in command:
        return command
    printed = seen.strip().split("\n")
    return command.replace("{seen}", printed[-1]).replace("{top}", printed[0])


def _misname(command: str, steps: tuple[Step, ...], rng: random.Random) -> str:
    # One name of the command becomes another of the task's names.
    words = command.split(" ")
    names = sorted({word for step in steps for word in step.right.split(" ") if NAME.fullmatch(word)})
    places = [place for place, word in enumerate(words) if word in names]
    if not places or len(names) < 2:
        return command
    place = rng.choice(places)
    words[place] = rng.choice([name for name in names if name != words[place]])
    return " ".join(words)
