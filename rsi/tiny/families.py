"""Task families of the suites `core`, `hard` and `long`: each draws a task from a generator of numbers."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from rsi.tiny.checks import Check, Condition, Entries, Gone, Same, passes, test_script
from rsi.tiny.shell import World
from rsi.tiny.steps import KINDS, Draft, Redraw, Step, conf, set_key

HELD_OUT = 4  # of the compositions of `long` and `swr`, one in this many is for evaluation only


@dataclass(frozen=True)
class TaskSpec:
    """A task before it is written: what the agent sees (`instruction`, `files`) and what judges it.

    `composition` is the tuple of step kinds; `checks` names every check, `hidden` those that the
    instruction never names; `criteria` are the checks themselves, `steps` the way to the solution.
    """

    name: str
    family: str
    suite: str
    composition: tuple[str, ...]
    instruction: str
    files: dict[str, str]
    checks: tuple[str, ...]
    hidden: tuple[str, ...]
    criteria: tuple[Check, ...]
    steps: tuple[Step, ...]

    @property
    def tests(self) -> str:
        """`tests/test.sh`."""
        return test_script(self.criteria)

    @property
    def solution(self) -> str:
        """`solution/solve.sh`."""
        return "#!/bin/bash\nset -e\n" + "".join(f"{step.solve}\n" for step in self.steps if step.solve)

    def solved(self, world: World) -> bool:
        """Whether every check passes in `world`."""
        return all(passes(check, world) for check in self.criteria)


def finish(draft: Draft, family: str, suite: str, hidden: tuple[Check, ...] = ()) -> TaskSpec:
    """Close the draft: fill in the checks' texts, make sure that a no-op passes none of them.

    Raises:
        Redraw: where a check is already passed, or is about a file that a later step took away.
    """
    criteria: list[Check] = []
    seen: dict[str, int] = {}
    for step in draft.steps:
        for name, conditions in step.checks.items():
            seen[name] = seen.get(name, 0) + 1
            criteria.append(Check(f"{name}-{seen[name]}" if seen[name] > 1 else name, conditions))
    criteria += hidden
    filled = tuple(
        Check(check.name, tuple(_fill(condition, draft.world) for condition in check.conditions), check.hidden)
        for check in criteria
    )
    instruction, steps = _number(draft.steps)
    start = World(draft.files)
    if any(passes(check, start) or not passes(check, draft.world) for check in filled):
        raise Redraw("a check is passed from the start, or never")
    return TaskSpec(
        name="",
        family=family,
        suite=suite,
        composition=tuple(step.kind for step in draft.steps if step.kind != "look"),
        instruction=instruction,
        files=draft.files,
        checks=tuple(check.name for check in filled),
        hidden=tuple(check.name for check in filled if check.hidden),
        criteria=filled,
        steps=steps,
    )


def _number(steps: list[Step]) -> tuple[str, tuple[Step, ...]]:
    # Several sentences are numbered, and every step knows the sentence it is done for: without that a small
    # model does not learn in time to keep its place in a long task.
    sentences = [step.sentence for step in steps if step.sentence]
    if len(sentences) == 1:
        return sentences[0], tuple(steps)
    numbered, place = [], 1
    for step in steps:
        numbered.append(step._replace(plan=str(place)))
        place += bool(step.sentence)
    return "\n".join(f"{place}) {sentence}" for place, sentence in enumerate(sentences, 1)), tuple(numbered)


def _fill(condition: Condition, world: World) -> Condition:
    if isinstance(condition, Same):
        if condition.path not in world.files:
            raise Redraw(condition.path)
        return Same(condition.path, world.files[condition.path])
    return condition


def core(family: str, kinds: tuple[str, ...]) -> Callable[[random.Random], TaskSpec]:
    """The family that draws one step of one of `kinds`."""

    def draw(rng: random.Random) -> TaskSpec:
        draft = Draft(rng)
        draft.make(rng.choice(kinds))
        return finish(draft, family, "core")

    return draw


def look(command: str) -> Step:
    """A step that only looks."""
    return Step("look", "", command, "", "", {})


def find(rng: random.Random) -> TaskSpec:
    """Find the file that has a word, move it, derive another from it."""
    draft = Draft(rng)
    d, w, keep = draft.word(), draft.word(), f"{draft.word()}.txt"
    pool = [draft.word() for _ in range(4)]
    paths = [f"{d}/{draft.word()}.txt" for _ in range(3)]
    wanted = rng.choice(paths)
    for path in paths:
        lines = [rng.choice(pool) for _ in range(4)]
        if path == wanted:
            lines[rng.randrange(4)] = w
        draft.file(path, "".join(f"{line}\n" for line in lines))
    sentence = rng.choice([f"Find the file in {d} that has {w} and move it to {keep}.",
                           f"Move the file of {d} with the word {w} to {keep}."])  # fmt: skip
    seen = draft.add(look(f"grep -rl {w} {d}"))
    rest = tuple(Same(path, "") for path in paths if path != wanted)
    draft.add(Step("move", sentence, f"mv {{seen}} {keep}", f"cp {{seen}} {keep}",
                   f"mv --no-target-directory /app/{wanted} /app/{keep}",
                   {"arrived": (Same(keep, ""),), "moved": (Same(keep, ""), Gone(wanted)),
                    "others": (Gone(wanted), *rest)}), seen)  # fmt: skip
    if rng.random() < 0.7:
        draft.make(rng.choice(("sort", "first", "reverse", "last", "flip", "prepend")), keep)
    return finish(draft, "find", "hard")


def config(rng: random.Random) -> TaskSpec:
    """Set a key in the one config that the README names, keep a copy."""
    draft = Draft(rng)
    d = draft.word()
    paths = [conf(draft, f"{d}/{draft.word()}.conf")[0] for _ in range(2)]
    path, key, value = conf(draft, f"{d}/{draft.word()}.conf")
    draft.file("README.md", f"The main config is\n{path}\n")
    seen = draft.add(look("cat README.md"))
    sentence = rng.choice([f"Set {key} to {value} in the config that README.md names.",
                           f"README.md names the main config. Change its {key} to {value}."])  # fmt: skip
    step = set_key("{seen}", key, value, sentence)
    checks = set_key(path, key, value, sentence)
    others = {"others": (*checks.checks["value"], *(Same(other, "") for other in paths))}
    draft.add(step._replace(solve=checks.solve, checks=checks.checks | others), seen)
    if rng.random() < 0.7:
        draft.make(rng.choice(("create", "append", "copy", "run", "empty")))
    return finish(draft, "config", "hard")


def tally(rng: random.Random) -> TaskSpec:
    """Count lines, write the number into a config."""
    draft = Draft(rng)
    a = draft.text()
    lines = draft.world.files[a].splitlines()
    w = rng.choice(lines)
    path, key, _ = conf(draft)
    count = lines.count(w)
    if f"{key}={count}\n" in draft.files[path] or count == len(lines):
        raise Redraw(path)
    sentence = rng.choice([f"Count the lines of {a} with {w} and set {key} to that number in {path}.",
                           f"Set {key} in {path} to how many lines of {a} have {w}."])  # fmt: skip
    seen = draft.add(Step("tally", "", f"grep -c {w} {a}", f"wc -l < {a}", "", {}))
    step = set_key(path, key, "{seen}", sentence, solve_value=count)
    intact = {"intact": (*step.checks["value"], Same(a, ""))}
    draft.add(step._replace(checks=step.checks | intact), seen)
    if rng.random() < 0.5:
        draft.make(rng.choice(("create", "copy", "sort", "first")))
    return finish(draft, "tally", "hard")


def shelf(rng: random.Random) -> TaskSpec:
    """List a folder, take its last file by name."""
    draft = Draft(rng)
    d, keep = draft.word(), f"{draft.word()}.txt"
    pool = [draft.word() for _ in range(4)]
    paths = sorted(f"{d}/{draft.word()}.txt" for _ in range(3))
    for path in paths:
        draft.file(path, "".join(f"{rng.choice(pool)}\n" for _ in range(4)))
    if len({draft.files[path] for path in paths}) < 3:
        raise Redraw(d)
    draft.add(look(f"ls {d}"))
    sentence = rng.choice([f"Copy the last file by name in {d} to {keep}.",
                           f"Of the files in {d} copy the last by name to {keep}."])  # fmt: skip
    intact = (Same(keep, ""), *(Same(path, "") for path in paths))
    draft.add(Step("pick", sentence, f"cp {d}/{{seen}} {keep}", f"cp {d}/{{top}} {keep}",
                   f"cp --no-target-directory /app/{paths[-1]} /app/{keep}",
                   {"picked": (Same(keep, ""),), "intact": intact}), paths[-1].rpartition("/")[2])  # fmt: skip
    draft.make(rng.choice(("sort", "first", "reverse", "last", "flip", "match")), keep)
    return finish(draft, "shelf", "hard")


def _compose(rng: random.Random, habits: tuple[str, ...], plain: tuple[str, ...], length: int) -> list[str]:
    # One point of habit, now and then two, the rest without.
    points = rng.choice((1, 1, 1, 2))
    kinds = rng.sample(habits, points) + [rng.choice(plain) for _ in range(length - points)]
    rng.shuffle(kinds)
    return kinds


def _stress(draft: Draft, sources: list[str]) -> tuple[Check, ...]:
    # Hidden: each needs the last artifact as well, so that doing nothing passes none.
    last = next(conditions for step in reversed(draft.steps) for conditions in step.checks.values())
    intact = tuple(Same(path, draft.files[path]) for path in sources)
    entries = Entries(len(draft.world.files) + len(draft.world.dirs))
    if any(draft.world.files.get(path) != draft.files[path] for path in sources):
        raise Redraw("a source was changed")
    every = tuple(
        condition
        for step in draft.steps[:-1]
        for conditions in step.checks.values()
        for condition in conditions
        if isinstance(condition, Same)
    )
    hidden: dict[str, tuple[Condition, ...]] = {"intact": intact, "stray": (entries,), "all": every}
    return tuple(Check(f"hidden-{name}", (*last, *more), True) for name, more in hidden.items())


def chain(rng: random.Random) -> TaskSpec:
    """A chain of text operations: each takes what the one before made."""
    draft = Draft(rng)
    pool = [draft.word() for _ in range(5)]
    start = draft.file(f"{draft.word()}.txt", "".join(f"{rng.choice(pool)}\n" for _ in range(rng.randint(8, 10))))
    habits = ("reverse", "unique", "flip", "last", "drop", "join")
    kinds = _compose(rng, habits, ("sort", "first", "match", "copy"), rng.randint(4, 6))
    if kinds[-1] == "match" and rng.random() < 0.5:
        kinds[-1] = "count"
    path = start
    for kind in kinds:
        path = draft.make(kind, path)
    return finish(draft, "chain", "long", _stress(draft, [start]))


def layout(rng: random.Random) -> TaskSpec:
    """A folder is made and filled; what goes in is then worked on there."""
    draft = Draft(rng)
    place = draft.make("tree")
    bystander = draft.text(3)
    habits, plain = ("move", "append", "run", "empty", "clean"), ("copy", "create", "create", "sort")
    path: str | None = None
    for kind in ["create", *_compose(rng, habits, plain, rng.randint(2, 5))]:
        source = path if kind in ("append", "sort") else None
        made = draft.make(kind, source, "" if kind in ("append", "run", "empty", "clean") else f"{place}/")
        path = made if made.startswith(place) else path
    return finish(draft, "layout", "long", _stress(draft, [bystander]))


def release(rng: random.Random) -> TaskSpec:
    """Notes and config are edited, results gathered in a folder."""
    draft = Draft(rng)
    place = draft.make("tree")
    bystander = draft.text(3)
    habits, plain = ("set", "replace", "prepend", "delete", "reverse", "last"), ("copy", "sort", "first", "create")
    path: str | None = None
    for kind in _compose(rng, habits, plain, rng.randint(3, 6)):
        edits = kind in ("set", "replace", "prepend", "delete")
        source = None if kind in ("set", "replace", "create") or path is None else path
        if source is not None and kind == "copy" and source.startswith(place):
            source = None
        made = draft.make(kind, source, "" if edits else f"{place}/")
        path = made if made.endswith(".txt") and len(draft.world.files[made].splitlines()) > 2 else path
    return finish(draft, "release", "long", _stress(draft, [bystander]))


CORE = {
    "order": ("reverse", "unique", "flip", "sort"),
    "select": ("last", "drop", "count", "column", "first"),
    "place": ("move", "clean", "empty", "join", "copy"),
    "edit": ("replace", "set", "append", "prepend", "delete", "run"),
}
assert {kind for kinds in CORE.values() for kind in kinds} <= set(KINDS)
