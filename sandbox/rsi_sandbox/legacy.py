"""Terminal-Bench 1's task folders, read as Harbor tasks that are verified in a snapshot.

    task.yaml  Dockerfile (+ files)  docker-compose.yaml  run-tests.sh  tests/  solution.sh

Source: terminal-bench 0.2.18 (`terminal_bench/handlers/trial_handler.py`). There the verdict is read off the
screen; here it is the exit status of run-tests.sh, which pytest sets, cross-checked against its report.
"""

import re
from pathlib import Path
from typing import Any

from .dockerfile import read_dockerfile, read_folder, read_text
from .records import File, TaskError
from .task import WORKDIR, Fields, Task

_TEST = """#!/bin/bash
export TEST_DIR=/tests T_BENCH_TEST_DIR=/tests
bash /tests/run-tests.sh
code=$?
((code == 126 || code == 127)) || echo $((code == 0)) >/logs/verifier/reward.txt
"""
_KNOWN = (
    "author_name author_email category tags difficulty disable_asciinema estimated_duration_sec "
    "expert_time_estimate_min junior_time_estimate_min parser_name run_tests_in_same_shell"
).split()
_PRIVATE = ("task.yaml", "docker-compose.yaml", "run-tests.sh", "tests", "solution.sh", "solution.yaml", "solution")


def load_legacy(folder: Path) -> Task:
    """Read a Terminal-Bench 1 folder; raises TaskError."""
    config = folder / "task.yaml"
    fields = Fields(config, parse_yaml(config))
    instruction = fields.value("instruction", str, "").strip()
    if not instruction:
        raise fields.error("instruction", instruction, "is empty", "write what the agent has to do")
    if (parser := fields.value("parser_name", str, "pytest")) != "pytest":
        raise fields.error("parser_name", parser, "reads a screen, which is never done here", "use a pytest task")
    fields.read.update(_KNOWN)
    if fields.fields.get("run_tests_in_same_shell") is True:
        raise fields.error("run_tests_in_same_shell", True, "would judge in the agent's shell", "set it to false")
    run = folder / "run-tests.sh"
    tests = [File("/tests/run-tests.sh", read_text(run).encode(), 0o755), File("/tests/test.sh", _TEST.encode(), 0o755)]
    if (folder / "tests").is_dir():
        tests += read_folder(folder / "tests", "/tests")
    solution = []
    if (folder / "solution.sh").is_file():
        solution = [File("/solution/solve.sh", read_text(folder / "solution.sh").encode(), 0o755)]
    image = read_dockerfile(folder)
    workdir = image.workdir or WORKDIR
    variables = (image.variables if not image.docker_only else {}) | _service(folder)
    return Task(
        folder=folder.resolve(),
        name=folder.resolve().name,
        instruction=instruction,
        workdir=workdir,
        agent_timeout=fields.positive("max_agent_timeout_sec", 360.0),
        verifier_timeout=fields.positive("max_test_timeout_sec", 60.0),
        artifacts=(workdir,),
        tests=tuple(tests),
        variables=tuple(variables.items()),
        base=image.base,
        docker_only=f"{config}: a Terminal-Bench 1 task is verified in a snapshot, which only docker can make",
        mode="snapshot",
        build_folder=folder.resolve(),
        solution=tuple(solution),
        notes=tuple(f"task.yaml: {name}: not read" for name in fields.unread()),  # last: of what is read above
    )


def is_private(name: str) -> bool:
    """Whether a path of the folder, relative to it, must not get into the image."""
    return name.split("/")[0] in _PRIVATE


def _service(folder: Path) -> dict[str, str]:
    """Environment of the one plain service that docker-compose.yaml may hold."""
    file = folder / "docker-compose.yaml"
    if not file.exists():
        return {}
    services = parse_yaml(file).get("services")
    if not isinstance(services, dict) or len(services) != 1:
        raise TaskError(f"{file}: services: {list(services or ())!r} are not one service; only one is supported")
    (service,) = services.values()
    if odd := {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc"} & set(service or ()):
        raise TaskError(f"{file}: services: {sorted(odd)} weaken the isolation and are refused; remove them")
    environment = (service or {}).get("environment") or {}
    if isinstance(environment, list):
        environment = dict(str(entry).partition("=")[::2] for entry in environment)
    return {name: str(value) for name, value in environment.items() if "${" not in str(value)}


def parse_yaml(file: Path) -> dict[str, Any]:
    """The part of YAML that task files use: nested mappings and lists, plain and quoted scalars, block text."""
    return _Yaml(file, read_text(file).splitlines()).document()


class _Yaml:
    def __init__(self, file: Path, lines: list[str]):
        self.file, self.lines, self.at = file, lines, 0

    def document(self) -> dict[str, Any]:
        value = self.block(0)
        if not isinstance(value, dict) or self._peek() is not None:
            raise self.error("is not understood")
        return value

    def error(self, what: str) -> TaskError:
        line = self.lines[min(self.at, len(self.lines) - 1)] if self.lines else ""
        return TaskError(f"{self.file}: line {self.at + 1}: {line.strip()!r} {what}; use plain 'key: value' lines")

    def _peek(self) -> int | None:
        """Indentation of the next line with content."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip() and not line.lstrip().startswith("#") and line.strip() not in ("---", "..."):
                return len(line) - len(line.lstrip(" "))
            self.at += 1
        return None

    def block(self, indent: int) -> Any:
        """The mapping or list whose entries stand at the next line's indentation, at least `indent`."""
        own = self._peek()
        if own is None or own < indent:
            return None
        entries: dict[str, Any] = {}
        items: list[Any] = []
        while self._peek() == own:
            text = self.lines[self.at][own:]
            if text.startswith("- ") or text == "-":
                if entries:
                    raise self.error("mixes a list and a mapping")
                if re.match(r"- +[\w.-]+:( |$)", text):
                    self.lines[self.at] = " " * own + "  " + text[2:]
                    items.append(self.block(own + 1))
                else:
                    items.append(self.value(text[1:].strip(), own + 1))
                continue
            if items:
                break  # a list may stand as far left as the key that it belongs to
            found = re.match(r"""("[^"]*"|'[^']*'|[^\s:#][^:#]*?)\s*:(?:\s+(.*)|)$""", text)
            if not found:
                raise self.error("is not understood")
            entries[str(self.scalar(found[1]))] = self.value((found[2] or "").strip(), own + 1)
        return items or entries

    def value(self, text: str, indent: int) -> Any:
        """The value whose first line holds `text`; moves behind it."""
        self.at += 1
        if re.fullmatch(r"[|>][+-]?\d?", text):
            return self.text(indent, text)
        if not text or text.startswith("#"):
            following = self._peek()
            listed = following == indent - 1 and self.lines[self.at].lstrip().startswith("- ")
            return self.block(indent - 1 if listed else indent)
        if text[0] in "\"'":
            while not re.fullmatch(r"""("(\\.|[^"\\])*"|'(''|[^'])*')\s*(#.*)?""", text) and self.at < len(self.lines):
                text += " " + self.lines[self.at].strip()
                self.at += 1
        elif text[0] not in "[{":
            while (own := self._peek()) is not None and own >= indent and text:
                text += " " + self.lines[self.at].strip()
                self.at += 1
        return self.scalar(text)

    def text(self, indent: int, style: str) -> str:
        body: list[str] = []
        while self.at < len(self.lines) and (not self.lines[self.at].strip() or self.lines[self.at][:indent].isspace()):
            body.append(self.lines[self.at])
            self.at += 1
        depth = min((len(line) - len(line.lstrip(" ")) for line in body if line.strip()), default=0)
        text = "\n".join(line[depth:] for line in body).rstrip("\n")
        if style[0] == ">":
            text = re.sub(r"(?<=\S)\n(?=\S)", " ", text).replace("\n\n", "\n")
        return text if "-" in style else text + "\n"

    def scalar(self, text: str) -> Any:
        if text.startswith('"'):
            return re.sub(r"\\(.)", lambda c: {"n": "\n", "t": "\t"}.get(c[1], c[1]), text[1 : text.rindex('"')])
        if text.startswith("'"):
            return text[1 : text.rindex("'")].replace("''", "'")
        if text.startswith("[") and text.rstrip().endswith("]"):
            parts = re.findall(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[^,]+)""", text.rstrip()[1:-1])
            return [self.scalar(part.strip()) for part in parts if part.strip()]
        if text.startswith(("{", "&", "*", "!")) and text != "{}":
            raise self.error("is not understood")
        text = re.sub(r"\s+#.*", "", text).strip()
        if text in ("true", "false", "True", "False"):
            return text in ("true", "True")
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        if re.fullmatch(r"-?\d+\.\d*", text):
            return float(text)
        return {"null": None, "~": None, "{}": {}}.get(text, text)
