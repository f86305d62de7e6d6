"""Task families of the suite `swr`: reconstruct a workflow from an input and the output wanted.

The agent reads an example and writes a script; the checks run it on the example and on hidden inputs.
The habit is a favourite workflow, whatever the example shows.
"""

import random

from rsi.tiny.checks import Check, Condition, Flow, run_flow
from rsi.tiny.families import TaskSpec, finish, look
from rsi.tiny.steps import Draft, Redraw, Step

# What the example shows of an operation is shallow: how many lines, a colon or none, the first word's place.
COLUMNS = ("cut -d: -f1", "cut -d: -f2")
LIMITS = ("", "head -n 1", "head -n 2")
ARRANGEMENTS = (
    ("", "head -n 1"), ("", "head -n 2"), ("", "paste -s -d:"),
    ("tac", ""), ("tac", "head -n 1"), ("tac", "head -n 2"), ("tac", "paste -s -d:"),
)  # fmt: skip
SINGLES = ("head -n 1", "head -n 2", "tac", "wc -l", "paste -s -d:", "cut -d: -f1")
# The favourite: the first column, the order as it is (sorted, where an order is needed), the first line.
FAVOURITES = 0.25  # share of tasks for which the favourite is right, so that habit alone solves them


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


def _close(draft: Draft, family: str, composition: tuple[str, ...]) -> TaskSpec:
    spec = finish(draft, family, "swr")
    criteria = tuple(Check(c.name, c.conditions, c.name.startswith("hidden")) for c in spec.criteria)
    hidden = tuple(check.name for check in criteria if check.hidden)
    return TaskSpec(**{**vars(spec), "composition": composition, "criteria": criteria, "hidden": hidden})


def _single(rng: random.Random, family: str, stages: tuple[str, str], habit: tuple[str, str], columns: int) -> TaskSpec:
    draft = Draft(rng)
    given = _table(rng, draft, columns)
    name, path = draft.word(), f"{draft.word()}.sh"
    script, usual = (" | ".join(stage for stage in pair if stage) for pair in (stages, habit))
    usual = "" if usual == script else usual
    draft.file(f"{name}.in", given)
    draft.file(f"{name}.out", run_flow(script, given).output)
    draft.add(look(f"cat {name}.in"))
    draft.add(look(f"cat {name}.out"))
    sentence = rng.choice([f"Write {path} that turns {name}.in into {name}.out.",
                           f"{path} must read input like {name}.in and print output like {name}.out."])  # fmt: skip
    _flow(draft, sentence, script, usual, given, path, rng.randint(1, 2))
    return _close(draft, family, (family, *stages))


def fields(rng: random.Random) -> TaskSpec:
    """A column of the first or last lines."""
    column, limit = COLUMNS[rng.random() > FAVOURITES], rng.choice(LIMITS)
    return _single(rng, "fields", (column, limit), (COLUMNS[0], limit), 2)


def arrange(rng: random.Random) -> TaskSpec:
    """An order, then a part of it or all on one line."""
    wanted = "" if rng.random() < FAVOURITES else "tac"
    order, part = rng.choice([stages for stages in ARRANGEMENTS if stages[0] == wanted])
    return _single(rng, "arrange", (order, part), ("" if part else "sort", part), 1)


def twin(rng: random.Random) -> TaskSpec:
    """Two scripts for one input."""
    draft = Draft(rng)
    pair = rng.sample(SINGLES, 2)
    given = _table(rng, draft, 2)
    name = draft.word()
    draft.file(f"{name}.in", given)
    draft.add(look(f"cat {name}.in"))
    for script in pair:
        out, path = draft.word(), f"{draft.word()}.sh"
        draft.file(f"{out}.out", run_flow(script, given).output)
        draft.add(look(f"cat {out}.out"))
        usual = SINGLES[0] if script != SINGLES[0] else ""
        sentence = f"Write {path} that turns {name}.in into {out}.out."
        _flow(draft, sentence, script, usual, given, path, 1)
    return _close(draft, "twin", ("twin", *pair))
