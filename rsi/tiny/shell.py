"""A few commands of a shell over files in memory: exact output, exit code and effect, without a process.

It knows just what the built-in tasks and their transcripts use. Anything else is `Unsupported`, so
nothing is ever guessed; a test compares every command with real bash.
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

TOKEN = re.compile(r"'[^']*'|[^\s']+")
MISSING = "No such file or directory"


class Unsupported(Exception):
    """The command, or its effect here, is outside of what is simulated."""


class Failure(Exception):
    """A command's error message and exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Outcome(NamedTuple):
    """Output (stdout and stderr together) and exit code."""

    output: str
    code: int


class World:
    """The working directory: `files` (path to text), `dirs` and the set of `executable` paths.

    Paths are relative: `World({"docs/plan.txt": "a\\n"}).run("cat docs/plan.txt") == ("a\\n", 0)`.
    """

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)
        self.dirs = {path[:cut] for path in files for cut in _cuts(path)}
        self.executable: set[str] = set()

    def copy(self) -> "World":
        """An independent copy."""
        other = World({})
        other.files, other.dirs, other.executable = dict(self.files), set(self.dirs), set(self.executable)
        return other

    def same(self, other: "World") -> bool:
        """Whether both hold the same files, folders and modes."""
        return (self.files, self.dirs, self.executable) == (other.files, other.dirs, other.executable)

    def read(self, path: str, message: str, code: int = 1) -> str:
        """Text of `path`; `message` (with {path}) is the error where it is missing."""
        if path in self.dirs:
            raise Unsupported(f"{path} is a folder")
        if path not in self.files:
            raise Failure(message.format(path=path), code)
        return self.files[path]

    def write(self, path: str, text: str, append: bool = False) -> None:
        """What `>` and `>>` do."""
        if path in self.dirs or (folder(path) and folder(path) not in self.dirs):
            raise Unsupported(f"cannot write {path}")
        self.files[path] = self.files.get(path, "") + text if append else text

    def run(self, command: str) -> Outcome:
        """Run one command line: pipes, `<`, `>` and `>>` included.

        Raises:
            Unsupported: for anything outside of the known commands.
        """
        if command.count("'") % 2:
            raise Unsupported("a quote is left open")
        words = TOKEN.findall(command)
        text: str | None = None
        target, append = None, False
        if len(words) > 2 and words[-2] in (">", ">>"):
            target, append, words = words[-1], words[-2] == ">>", words[:-2]
        if len(words) > 2 and words[-2] == "<":
            if words[-1] not in self.files:
                raise Unsupported("the shell's own message differs with how it was started")
            text, words = self.files[words[-1]], words[:-2]
        if any(word in ("<", ">", ">>") for word in words):
            raise Unsupported(command)
        if target is not None:
            if target in words:
                raise Unsupported("reads what it writes")
            self.write(target, "", append)
        try:
            code = 0
            for stage in " ".join(words).split(" | ") if "|" in words else [words]:
                arguments = TOKEN.findall(stage) if isinstance(stage, str) else stage
                arguments = [word[1:-1] if word[0] == "'" else word for word in arguments]
                if not arguments or arguments[0] not in TOOLS:
                    raise Unsupported(command)
                text, code = TOOLS[arguments[0]](self, arguments[1:], text)
        except Failure as failure:
            return Outcome(f"{failure}\n", failure.code)
        if target is not None:
            self.write(target, text or "", append)
            text = ""
        return Outcome(text or "", code)


def folder(path: str) -> str:
    """`docs/a/b.txt` to `docs/a`; "" at the top."""
    return path.rpartition("/")[0]


def _cuts(path: str) -> list[int]:
    return [place for place, letter in enumerate(path) if letter == "/"]


def _source(world: World, paths: list[str], text: str | None, message: str, code: int = 1) -> str:
    if not paths:
        if text is None:
            raise Unsupported("reads the terminal")
        return text
    if len(paths) > 1 and any(path not in world.files for path in paths):
        raise Unsupported("several inputs, one missing")
    return "".join(world.read(path, message, code) for path in paths)


def _cat(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    return _source(world, words, text, f"cat: {{path}}: {MISSING}"), 0


def _sort(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    options = [word for word in words if word[0] == "-"]
    paths = [word for word in words if word[0] != "-"]
    if not set(options) <= {"-r", "-u"}:
        raise Unsupported(f"sort {options}")
    lines = _source(world, paths, text, f"sort: cannot read: {{path}}: {MISSING}", 2).splitlines(True)
    return "".join(sorted(set(lines) if "-u" in options else lines, reverse="-r" in options)), 0


def _uniq(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    lines = _source(world, words, text, f"uniq: {{path}}: {MISSING}").splitlines(True)
    return "".join(line for line, _ in groupby(lines)), 0


def _end(world: World, words: list[str], text: str | None, tool: str) -> tuple[str, int]:
    if len(words) < 2 or words[0] != "-n" or not words[1].isdigit():
        raise Unsupported(f"{tool} {words}")
    message = f"{tool}: cannot open '{{path}}' for reading: {MISSING}"
    lines = _source(world, words[2:], text, message).splitlines(True)
    count = int(words[1])
    return "".join(lines[:count] if tool == "head" else lines[max(0, len(lines) - count) :]), 0


def _tac(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    source = _source(world, words, text, f"tac: failed to open '{{path}}' for reading: {MISSING}")
    return "".join(reversed(source.splitlines(True))), 0


def _wc(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if words != ["-l"] or text is None:
        raise Unsupported(f"wc {words}")
    return f"{text.count(chr(10))}\n", 0


def _paste(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if words[:2] != ["-s", "-d:"]:
        raise Unsupported(f"paste {words}")
    source = _source(world, words[2:], text, f"paste: {{path}}: {MISSING}")
    return ":".join(source.splitlines()) + "\n", 0


def _cut(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) < 2 or words[0] != "-d:" or not re.fullmatch("-f[1-9]", words[1]):
        raise Unsupported(f"cut {words}")
    column = int(words[1][2:]) - 1
    output = ""
    for line in _source(world, words[2:], text, f"cut: {{path}}: {MISSING}").splitlines():
        parts = line.split(":")
        output += (line if len(parts) == 1 else parts[column] if column < len(parts) else "") + "\n"
    return output, 0


def _grep(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    option, words = (words[0], words[1:]) if words and words[0][0] == "-" else ("", words)
    if option not in ("", "-c", "-v", "-rl") or not words or not words[0].isalpha():
        raise Unsupported(f"grep {option} {words}")
    if option == "-rl":
        inside = [path for path in world.files if path.startswith(f"{words[1]}/")]
        found = [path for path in inside if words[0] in world.files[path]]
        if words[1] not in world.dirs or len(found) > 1:
            raise Unsupported("grep -rl: the order of several files is not known")
        return "".join(f"{path}\n" for path in found), 0 if found else 1
    lines = _source(world, words[1:], text, f"grep: {{path}}: {MISSING}", 2).splitlines(True)
    kept = [line for line in lines if (words[0] in line) != (option == "-v")]
    return f"{len(kept)}\n" if option == "-c" else "".join(kept), 0 if kept else 1


def _sed(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 3 or words[0] != "-i":
        raise Unsupported(f"sed {words}")
    script, path = words[1:]
    if path not in world.files:
        raise Failure(f"sed: can't read {path}: {MISSING}", 4 if not path else 2)
    lines = world.files[path].splitlines(True)
    if match := re.fullmatch(r"s/(\^?[a-z]+(?:=\.\*)?)/([a-z]+(?:=\w+)?)/(g?)", script):
        old, new, everywhere = match.groups()
        lines = [re.sub(old, new, line, count=0 if everywhere else 1) for line in lines]
    elif match := re.fullmatch(r"/([a-z]+)/d", script):
        lines = [line for line in lines if match[1] not in line]
    elif match := re.fullmatch(r"1i ([a-z ]+)", script):
        lines = [f"{match[1]}\n", *lines] if lines else []
    else:
        raise Unsupported(f"sed {script}")
    world.files[path] = "".join(lines)
    return "", 0


def _echo(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    return " ".join(words) + "\n", 0


def _transfer(world: World, words: list[str], text: str | None, tool: str) -> tuple[str, int]:
    if len(words) != 2 or words[0] in world.dirs or words[0].endswith("/"):
        raise Unsupported(f"{tool} {words}")
    source, target = words
    moved = world.read(source, f"{tool}: cannot stat '{{path}}': {MISSING}")
    if target in world.dirs:
        target = f"{target}/{source.rpartition('/')[2]}"
    if folder(target) and folder(target) not in world.dirs:
        effort = f"move '{source}' to" if tool == "mv" else "create regular file"
        raise Failure(f"{tool}: cannot {effort} '{target}': {MISSING}")
    if source == target:
        raise Failure(f"{tool}: '{source}' and '{target}' are the same file")
    world.files[target] = moved
    mode = source in world.executable
    if tool == "mv" or target not in world.executable:
        world.executable = world.executable - {target} | ({target} if mode else set())
    if tool == "mv":
        del world.files[source]
        world.executable.discard(source)
    return "", 0


def _mkdir(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 2 or words[0] != "-p" or words[1] in world.files:
        raise Unsupported(f"mkdir {words}")
    world.dirs |= {words[1], *(words[1][:cut] for cut in _cuts(words[1]))}
    return "", 0


def _rm(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 1:
        raise Unsupported(f"rm {words}")
    base, star, ending = words[0].partition("*")
    paths = [words[0]]
    if star:
        paths = [path for path in world.files if path.startswith(base) and path.endswith(ending)]
        paths = [path for path in paths if "/" not in path[len(base) :]]
        if not base.endswith("/") or not paths or any(path.startswith(base) for path in world.dirs):
            raise Unsupported(f"rm {words}")
    for path in paths:
        world.read(path, f"rm: cannot remove '{{path}}': {MISSING}")
        del world.files[path]
        world.executable.discard(path)
    return "", 0


def _truncate(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if words[:2] != ["-s", "0"] or len(words) != 3:
        raise Unsupported(f"truncate {words}")
    world.write(words[2], "")
    return "", 0


def _chmod(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 2 or words[0] != "+x":
        raise Unsupported(f"chmod {words}")
    world.read(words[1], f"chmod: cannot access '{{path}}': {MISSING}")
    world.executable.add(words[1])
    return "", 0


def _ls(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 1 or words[0] not in world.dirs:
        raise Unsupported(f"ls {words}")
    start = f"{words[0]}/"
    inside = [path[len(start) :].partition("/")[0] for path in [*world.files, *world.dirs] if path.startswith(start)]
    return "".join(f"{name}\n" for name in sorted(set(inside))), 0


def _bash(world: World, words: list[str], text: str | None) -> tuple[str, int]:
    if len(words) != 1:
        raise Unsupported(f"bash {words}")
    script = world.read(words[0], f"bash: {{path}}: {MISSING}", 127)
    outcomes = [world.run(line) for line in script.splitlines()]
    return "".join(outcome.output for outcome in outcomes), outcomes[-1].code if outcomes else 0


Tool = Callable[[World, list[str], str | None], tuple[str, int]]
TOOLS: dict[str, Tool] = {
    "cat": _cat, "sort": _sort, "uniq": _uniq, "tac": _tac, "wc": _wc, "paste": _paste, "cut": _cut,
    "grep": _grep, "sed": _sed, "echo": _echo, "mkdir": _mkdir, "rm": _rm, "truncate": _truncate,
    "chmod": _chmod, "ls": _ls, "bash": _bash, "head": partial(_end, tool="head"), "tail": partial(_end, tool="tail"),
    "mv": partial(_transfer, tool="mv"), "cp": partial(_transfer, tool="cp"),
}  # fmt: skip
