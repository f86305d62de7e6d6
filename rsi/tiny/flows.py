"""Task families of the suite `swr`: reconstruct a workflow from an input and the output wanted.

The agent reads an example and writes a script; the checks run it on the example and on hidden inputs.
The habit is a favourite workflow, whatever the example shows.
"""

import random
from dataclasses import replace

from rsi.tiny.checks import Check, Condition, Flow, run_flow
from rsi.tiny.families import TaskSpec, finish, look
from rsi.tiny.steps import Draft, Redraw, Step

# What the example shows of a workflow is shallow: how many lines, a colon or none, the first word's place.
# Each stands beside the favourite that habit writes instead of it, itself where habit is right.
COLUMNS = ("cut -d: -f1", "cut -d: -f2")
LIMITS = ("", " | head -n 1", " | head -n 2")
FIELDS = {f"{column}{limit}": f"{COLUMNS[0]}{limit}" for column in COLUMNS for limit in LIMITS}
PARTS = ("head -n 1", "head -n 2", "paste -s -d:")
ARRANGEMENTS = {"tac": "sort"} | {part: part for part in PARTS} | {f"tac | {part}": part for part in PARTS}
SHAPES = dict.fromkeys(("head -n 1", "head -n 2", "tac", "wc -l", "paste -s -d:", "cut -d: -f1"), "head -n 1")
FAVOURITES = 0.25  # share of the workflows for which habit is right


def _table(rng: random.Random, draft: Draft, columns: int, pool: list[str] | None = None) -> str:
    words = iter(rng.sample(pool, len(pool))) if pool else iter(draft.word, None)
    rows = rng.randint(3, 4)
    return "".join(":".join(next(words) for _ in range(columns)) + "\n" for _ in range(rows))


def _flow(draft: Draft, sentence: str, script: str, habit: str, given: str, path: str, cases: int) -> None:
    # One script: its step, and a check for the example and each of the hidden inputs.
    rng = draft.rng
    pool = given.replace(":", "\n").split()
    columns = given.splitlines()[0].count(":") + 1
    inputs = [given, *(_table(rng, draft, columns, pool + [draft.word() for _ in range(4)]) for _ in range(cases))]
    outputs = [run_flow(script, text).output for text in inputs]
    if habit and any(run_flow(habit, text).output == output for text, output in zip(inputs, outputs, strict=True)):
        raise Redraw(habit)
    checks: dict[str, tuple[Condition, ...]] = {
        f"hidden-{path[:-3]}-{number}" if number else f"example-{path[:-3]}": (Flow(path, text, output),)
        for number, (text, output) in enumerate(zip(inputs, outputs, strict=True))
    }
    usual = f"echo '{habit}' > {path}" if habit else ""
    draft.add(Step("flow", sentence, f"echo '{script}' > {path}", usual,
                   f"printf '%s\\n' \"{_rewrite(script)}\" >/app/{path}", checks))  # fmt: skip


def _rewrite(script: str) -> str:
    # The solution's script is written otherwise than an attempt would write it.
    for short, long in (
        ("cut -d: -f", "cut --delimiter=: --fields="), ("head -n ", "head --lines="), ("sort -r", "sort --reverse"),
        ("tail -n ", "tail --lines="), ("wc -l", "wc --lines"), ("paste -s -d:", "paste --serial --delimiters=:"),
        (" | ", "|"),
    ):  # fmt: skip
        script = script.replace(short, long)
    return script


def _pair(rng: random.Random, family: str, workflows: dict[str, str], columns: int) -> TaskSpec:
    # Two scripts for one input. The pair is the task's composition: one that is held out joins two workflows
    # that are each trained on in other pairs.
    draft = Draft(rng)
    habitual = [script for script, favourite in workflows.items() if script == favourite]
    others = [script for script, favourite in workflows.items() if script != favourite]
    pair = [rng.choice(habitual if rng.random() < FAVOURITES else others) for _ in range(2)]
    if pair[0] == pair[1]:
        raise Redraw(pair[0])
    given = _table(rng, draft, columns)
    name = draft.word()
    draft.file(f"{name}.in", given)
    draft.add(look(f"cat {name}.in"))
    for script in pair:
        out, path = draft.word(), f"{draft.word()}.sh"
        draft.file(f"{out}.out", run_flow(script, given).output)
        draft.add(look(f"cat {out}.out"))
        sentence = f"Write {path} that turns {name}.in into {out}.out."
        habit = "" if workflows[script] == script else workflows[script]
        _flow(draft, sentence, script, habit, given, path, 1)
    spec = finish(draft, family, "swr")
    criteria = tuple(Check(c.name, c.conditions, c.name.startswith("hidden")) for c in spec.criteria)
    hidden = tuple(check.name for check in criteria if check.hidden)
    return replace(spec, composition=(family, *pair), criteria=criteria, hidden=hidden)


def fields(rng: random.Random) -> TaskSpec:
    """Columns of a table, of all its lines or the first ones."""
    return _pair(rng, "fields", FIELDS, 2)


def arrange(rng: random.Random) -> TaskSpec:
    """Lines in their order or upside down, the first ones or all on one line."""
    return _pair(rng, "arrange", ARRANGEMENTS, 1)


def shapes(rng: random.Random) -> TaskSpec:
    """Whatever makes the output's shape."""
    return _pair(rng, "shapes", SHAPES, 2)
