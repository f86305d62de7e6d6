"""Step kinds: the small operations that tasks are composed of.

Each gives its sentence of the instruction, the right command, the *habit* (a plausible command that
leaves the task unsolved; "" where there is none), the solution's own way to do it and its checks.
In a command, `{seen}` stands for what the command before it printed (the last line of it).
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from rsi.tiny.checks import Condition, Gone, Has, Runnable, Same
from rsi.tiny.shell import World, folder
from rsi.tiny.words import KEYS, NUMBERS, WORDS


class Redraw(Exception):
    """The draw is degenerate (the habit would do, an output is empty): draw again."""


class Step(NamedTuple):
    """One command of a task.

    `Step("last", "Write the last 3 lines of a.txt to b.txt.", "tail -n 3 a.txt > b.txt",
    "head -n 3 a.txt > b.txt", "tail --lines=3 /app/a.txt >/app/b.txt", {"last": (Same("b.txt", ""),)})`;
    the text of a `Same` is filled in from the finished task, and so is `plan`, the number of the sentence.
    """

    kind: str
    sentence: str
    right: str
    habit: str
    solve: str
    checks: dict[str, tuple[Condition, ...]]
    plan: str = ""


class Draft:
    """A task being drawn: `files` it starts with, `world` after the steps so far, unused `word`s."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words = iter(rng.sample(WORDS, 48))
        self.files: dict[str, str] = {}
        self.world = World({})
        self.steps: list[Step] = []

    def word(self) -> str:
        """A word this task has not used."""
        return next(self.words)

    def file(self, path: str, text: str) -> str:
        """Put a file into the task's environment."""
        self.files[path] = text
        self.world.files[path] = text
        self.world.dirs |= World({path: ""}).dirs
        return path

    def text(self, lines: int | None = None) -> str:
        """A new `word.txt` of 5 to 7 lines from four words, repetitions included."""
        pool = [self.word() for _ in range(4)]
        count = lines or self.rng.randint(5, 7)
        return self.file(f"{self.word()}.txt", "".join(f"{self.rng.choice(pool)}\n" for _ in range(count)))

    def add(self, step: Step, seen: str = "") -> str:
        """Take the step, do the right command; returns what it printed.

        Raises:
            Redraw: where the habit has the same effect or the command fails.
        """
        before = self.world.copy()
        outcome = self.world.run(step.right.replace("{seen}", seen))
        if outcome.code:
            raise Redraw(step.right)
        if step.habit and not step.kind.startswith(("flow", "tally", "pick")):
            before.run(step.habit.replace("{seen}", seen))
            if before.same(self.world):
                raise Redraw(step.habit)
        self.steps.append(step)
        return outcome.output.strip().rpartition("\n")[2]

    def make(self, kind: str, source: str | None = None, place: str = "") -> str:
        """Draw a step of `kind` and `add` it; returns the path of what it made or changed."""
        step, target = KINDS[kind](self, source, place)
        self.add(step)
        if target in self.world.files and not self.world.files[target] and kind != "empty":
            raise Redraw(target)
        return target


Made = tuple[Step, str]


def _derive(kind: str, sentences: list[str], right: str, habit: str, solve: str) -> Callable[..., Made]:
    # A text operation from {a} to a new file {b}; {n} is a number, {w} a word of {a}, {k} a column.
    def make(draft: Draft, source: str | None, place: str) -> Made:
        a = source or (_table(draft) if kind == "column" else draft.text())
        b = f"{place}{draft.word()}.txt"
        lines = draft.world.files[a].splitlines()
        if len(lines) < 3:
            raise Redraw("too few lines")
        values = {
            "a": a,
            "b": b,
            "n": draft.rng.randint(2, min(4, len(lines) - 1)),
            "w": draft.rng.choice(lines),
            "k": draft.rng.randint(2, 3),
        }
        said, do, wrong, solved = (part.format(**values) for part in (draft.rng.choice(sentences), right, habit, solve))
        kept = (Same(b, ""), Same(a, "")) if source is None else (Same(b, ""),)
        return Step(kind, said, do, wrong, solved, {kind: kept}), b

    return make


def _table(draft: Draft) -> str:
    rows = [f"{draft.word()}:{draft.word()}:{draft.word()}\n" for _ in range(3)]
    return draft.file(f"{draft.word()}.txt", "".join(rows))


def _join(draft: Draft, source: str | None, place: str) -> Made:
    a, other, b = source or draft.text(), draft.text(3), f"{place}{draft.word()}.txt"
    sentence = draft.rng.choice([f"Put {a} after {other} into {b}.", f"Write to {b} what is in {a}, after {other}."])
    return Step("join", sentence, f"cat {other} {a} > {b}", f"cat {a} {other} > {b}",
                f"cat -- /app/{other} /app/{a} >/app/{b}", {"join": (Same(b, ""),)}), b  # fmt: skip


def _move(draft: Draft, source: str | None, place: str) -> Made:
    a = source or draft.text()
    b = f"{place}{a.rpartition('/')[2]}" if place else f"{draft.word()}.txt"
    target = folder(b) if place else b
    sentence = draft.rng.choice([f"Move {a} to {target}.", f"{a} must now be in {target}."] if place else
                                [f"Rename {a} to {b}.", f"Move {a} to {b}."])  # fmt: skip
    checks: dict[str, tuple[Condition, ...]] = {"arrived": (Same(b, ""),), "moved": (Same(b, ""), Gone(a))}
    if place:
        del checks["arrived"]
    return Step("move", sentence, f"mv {a} {target}", f"cp {a} {target}",
                f"mv --no-target-directory /app/{a} /app/{b}", checks), b  # fmt: skip


def _copy(draft: Draft, source: str | None, place: str) -> Made:
    a = source or draft.text()
    b = f"{place}{a.rpartition('/')[2]}" if place else f"{draft.word()}.txt"
    target = folder(b) if place else b
    sentence = draft.rng.choice([f"Copy {a} to {target}.", f"Keep a copy of {a} in {target}."])
    return Step("copy", sentence, f"cp {a} {target}", "", f"cp --no-target-directory /app/{a} /app/{b}",
                {"copy": (Same(b, ""), Same(a, ""))}), b  # fmt: skip


def _tree(draft: Draft, source: str | None, place: str) -> Made:
    b = f"{draft.word()}/{draft.word()}"
    sentence = draft.rng.choice([f"Make the folder {b}.", f"Create the folder {b}."])
    return Step("tree", sentence, f"mkdir -p {b}", "", f"install --directory /app/{b}", {}), b


def _clean(draft: Draft, source: str | None, place: str) -> Made:
    d = draft.word()
    kept = [draft.file(f"{d}/{draft.word()}.txt", f"{draft.word()}\n") for _ in range(2)]
    gone = [draft.file(f"{d}/{draft.word()}.tmp", f"{draft.word()}\n") for _ in range(2)]
    sentence = draft.rng.choice([f"Delete all .tmp files in {d}.", f"Remove every .tmp file of {d}."])
    return Step("clean", sentence, f"rm {d}/*.tmp", f"rm {d}/*", f"find /app/{d} -name '*.tmp' -delete", {
        "cleaned": tuple(Gone(path) for path in gone),
        "kept": (Gone(gone[0]), *(Same(path, "") for path in kept)),
    }), d  # fmt: skip


def _empty(draft: Draft, source: str | None, place: str) -> Made:
    a = draft.file(f"{draft.word()}.log", f"{draft.word()} {draft.word()}\n")
    sentence = draft.rng.choice([f"Empty {a} but keep the file.", f"Clear the text of {a}."])
    return Step("empty", sentence, f"truncate -s 0 {a}", f"rm {a}", f": >/app/{a}", {"empty": (Same(a, ""),)}), a


def _replace(draft: Draft, source: str | None, place: str) -> Made:
    old, new, other = draft.word(), draft.word(), draft.word()
    lines = [f"{old} {other} {old}\n", f"{other}\n", f"{other} {old}\n"]
    a = draft.file(f"{draft.word()}.txt", "".join(draft.rng.sample(lines, 3)))
    sentence = draft.rng.choice([f"Replace every {old} with {new} in {a}.", f"In {a} change all {old} to {new}."])
    return Step("replace", sentence, f"sed -i s/{old}/{new}/g {a}", f"sed -i s/{old}/{new}/ {a}",
                f"sed --in-place --expression='s,{old},{new},g' /app/{a}", {"replace": (Same(a, ""),)}), a  # fmt: skip


def conf(draft: Draft, path: str | None = None) -> tuple[str, str, int]:
    """A `.conf` file with three keys; returns its path, the key to set and the new value."""
    keys, numbers = draft.rng.sample(KEYS, 3), draft.rng.sample(NUMBERS, 4)
    text = "".join(f"{key}={number}\n" for key, number in zip(keys, numbers, strict=False))
    return draft.file(path or f"{draft.word()}.conf", text), draft.rng.choice(keys), numbers[3]


def set_key(path: str, key: str, value: object, sentence: str, solve_value: object = None) -> Step:
    """The step that sets `key` in the conf file `path`; the habit appends a second line."""
    value_solved = value if solve_value is None else solve_value
    return Step("set", sentence, f"sed -i s/^{key}=.*/{key}={value}/ {path}", f"echo {key}={value} >> {path}",
                f"sed --in-place --expression='s,^\\({key}\\)=.*,\\1={value_solved},' /app/{path}",
                {"value": (Has(path, f"{key}={value_solved}"),), "config": (Same(path, ""),)})  # fmt: skip


def _set(draft: Draft, source: str | None, place: str) -> Made:
    a, key, value = conf(draft)
    sentence = draft.rng.choice([f"Set {key} to {value} in {a}.", f"Change {key} to {value} in {a}."])
    return set_key(a, key, value, sentence), a


def _add_line(kind: str, where: list[str], right: str, habit: str, solve: str) -> Callable[..., Made]:
    def make(draft: Draft, source: str | None, place: str) -> Made:
        a, w = source or draft.text(), draft.word()
        said, do, wrong, solved = (part.format(a=a, w=w) for part in (draft.rng.choice(where), right, habit, solve))
        return Step(kind, said, do, wrong, solved, {kind: (Same(a, ""),)}), a

    return make


def _delete(draft: Draft, source: str | None, place: str) -> Made:
    a = source or draft.text()
    w = draft.rng.choice(draft.world.files[a].splitlines())
    sentence = draft.rng.choice([f"Delete the lines with {w} from {a}.", f"Drop all lines with {w} in {a} itself."])
    return Step("delete", sentence, f"sed -i /{w}/d {a}", f"grep -v {w} {a}",
                f"sed --in-place --expression='\\,{w},d' /app/{a}", {"delete": (Same(a, ""),)}), a  # fmt: skip


def _run(draft: Draft, source: str | None, place: str) -> Made:
    a = draft.file(f"{draft.word()}.sh", f"echo {draft.word()}\n")
    sentence = draft.rng.choice([f"Make {a} executable.", f"Allow {a} to be run as a program."])
    return Step("run", sentence, f"chmod +x {a}", f"bash {a}", f"chmod a+rx -- /app/{a}", {"run": (Runnable(a),)}), a


def _create(draft: Draft, source: str | None, place: str) -> Made:
    a, w, v = f"{place}{draft.word()}.txt", draft.word(), draft.word()
    sentence = draft.rng.choice([f"Write the line {w} {v} to {a}.", f"Create {a} with the line {w} {v}."])
    return Step("create", sentence, f"echo {w} {v} > {a}", "", f"printf '%s\\n' '{w} {v}' >/app/{a}",
                {"create": (Same(a, ""),)}), a  # fmt: skip


KINDS: dict[str, Callable[[Draft, str | None, str], Made]] = {
    "sort": _derive("sort", ["Sort {a} into {b}.", "Write the sorted lines of {a} to {b}."],
                    "sort {a} > {b}", "", "sort --output=/app/{b} /app/{a}"),
    "reverse": _derive("reverse", ["Sort {a} in reverse order into {b}.", "Write {a} sorted from z to a to {b}."],
                       "sort -r {a} > {b}", "sort {a} > {b}", "sort --reverse --output=/app/{b} /app/{a}"),
    "unique": _derive("unique", ["Write each distinct line of {a} once to {b}, sorted.",
                                 "Sort {a} without repeats into {b}."],
                      "sort -u {a} > {b}", "uniq {a} > {b}", "sort --unique --output=/app/{b} /app/{a}"),
    "flip": _derive("flip", ["Write {a} upside down to {b}.", "Write the lines of {a} from last to first to {b}."],
                    "tac {a} > {b}", "sort -r {a} > {b}", "tac -- /app/{a} >/app/{b}"),
    "first": _derive("first", ["Write the first {n} lines of {a} to {b}.", "Put the top {n} lines of {a} into {b}."],
                     "head -n {n} {a} > {b}", "", "head --lines={n} /app/{a} >/app/{b}"),
    "last": _derive("last", ["Write the last {n} lines of {a} to {b}.", "Put the final {n} lines of {a} into {b}."],
                    "tail -n {n} {a} > {b}", "head -n {n} {a} > {b}", "tail --lines={n} /app/{a} >/app/{b}"),
    "count": _derive("count", ["Count the lines of {a} with {w} into {b}.",
                               "Write how many lines of {a} have {w} to {b}."],
                     "grep -c {w} {a} > {b}", "wc -l < {a} > {b}", "grep --count --regexp={w} /app/{a} >/app/{b}"),
    "match": _derive("match", ["Write the lines of {a} with {w} to {b}.",
                               "Put all lines of {a} that have {w} into {b}."],
                     "grep {w} {a} > {b}", "", "grep --regexp={w} /app/{a} >/app/{b}"),
    "drop": _derive("drop", ["Write the lines of {a} without {w} to {b}.",
                             "Put all lines of {a} that lack {w} into {b}."],
                    "grep -v {w} {a} > {b}", "grep {w} {a} > {b}",
                    "grep --invert-match --regexp={w} /app/{a} >/app/{b}"),
    "column": _derive("column", ["Write column {k} of {a} to {b}.", "Put field {k} of each line of {a} into {b}."],
                      "cut -d: -f{k} {a} > {b}", "cut -d: -f1 {a} > {b}",
                      "cut --delimiter=: --fields={k} /app/{a} >/app/{b}"),
    "append": _add_line("append", ["Add the line {w} at the end of {a}.", "Append {w} to {a}."],
                        "echo {w} >> {a}", "echo {w} > {a}", "printf '%s\\n' '{w}' >>/app/{a}"),
    "prepend": _add_line("prepend", ["Add the line {w} at the top of {a}.", "Put {w} before the first line of {a}."],
                         "sed -i '1i {w}' {a}", "echo {w} >> {a}",
                         "sed --in-place --expression='1s,^,{w}\\n,' /app/{a}"),
    "join": _join, "move": _move, "copy": _copy, "tree": _tree, "clean": _clean, "empty": _empty,
    "replace": _replace, "set": _set, "delete": _delete, "run": _run, "create": _create,
}  # fmt: skip
