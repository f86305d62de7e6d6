"""Terminal tasks in Harbor's folder format.

    task.toml  instruction.md  environment/Dockerfile (+ files)  tests/test.sh (+ files)  solution/solve.sh

Source: Harbor 0.26 (`harbor/models/task/config.py`); the subset read here is listed in the README.
"""

import shlex
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .records import File, TaskError

_MAX_FOLDER_BYTES = 256 << 20


@dataclass(frozen=True)
class Task:
    """One task. `environment` holds the files that COPY puts into the image and `variables` its ENV; `tests`
    holds the files of tests/, which no agent's sandbox ever sees.

    `docker_only` says which Dockerfile line only a real image build understands, or is empty.
    Timeouts are seconds. `family`, `suite` and `checks` come from [metadata] ("" / "" / 0 when absent).
    """

    folder: Path
    name: str
    instruction: str
    workdir: str
    agent_timeout: float
    verifier_timeout: float
    artifacts: tuple[str, ...]
    memory_mb: int
    network: bool
    environment: tuple[File, ...] = field(repr=False)
    tests: tuple[File, ...] = field(repr=False)
    variables: tuple[tuple[str, str], ...]
    base: str
    docker_only: str
    family: str
    suite: str
    checks: int


def load_task(folder: Path) -> Task:
    """Read a task folder; raises TaskError("<file>: <field>: ...") for anything missing or malformed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TaskError(f"{folder}: folder: not a directory; give a folder that holds task.toml")
    config = folder / "task.toml"
    try:
        document = tomllib.loads(_text(config))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{config}: TOML: {error}; correct the syntax") from None
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise TaskError(f"{folder / 'instruction.md'}: instruction: empty; write what the agent has to do")
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{folder / 'tests' / 'test.sh'}: file: missing; it must write /logs/verifier/reward.txt")
    fields = _Fields(config, document)
    image = _read_dockerfile(folder / "environment")
    metadata = _Fields(config, fields.table("metadata"), "metadata.")
    environment = _Fields(config, fields.table("environment"), "environment.")
    artifacts = document.get("artifacts", [image.workdir])
    if not isinstance(artifacts, list):
        raise TaskError(f"{config}: artifacts: {artifacts!r} is not a list; give a list of absolute paths")
    network = environment.value("network_mode", str, "no-network")
    if network not in ("no-network", "public"):
        raise TaskError(f"{config}: environment.network_mode: {network!r} is unknown; use 'no-network' or 'public'")
    name = _Fields(config, fields.table("task"), "task.").value("name", str, folder.name)
    return Task(
        folder=folder.resolve(),
        name=name or folder.name,
        instruction=instruction,
        workdir=image.workdir,
        agent_timeout=_Fields(config, fields.table("agent"), "agent.").positive("timeout_sec", 600.0),
        verifier_timeout=_Fields(config, fields.table("verifier"), "verifier.").positive("timeout_sec", 600.0),
        artifacts=tuple(_artifact(config, entry) for entry in artifacts),
        memory_mb=int(environment.positive("memory_mb", 2048)),
        network=network == "public",
        environment=tuple(image.files),
        tests=tuple(read_folder(folder / "tests", "/tests")),
        variables=tuple(image.variables.items()),
        base=image.base,
        docker_only=image.docker_only,
        family=metadata.value("family", str, ""),
        suite=metadata.value("suite", str, ""),
        checks=metadata.value("checks", int, 0),
    )


def read_folder(folder: Path, destination: str) -> list[File]:
    """The files under `folder` as they are placed below `destination`; links may not leave the folder."""
    files: list[File] = []
    total = 0
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        target = f"{destination.rstrip('/')}/{path.relative_to(folder).as_posix()}"
        if not path.resolve().is_relative_to(root):
            raise TaskError(f"{path}: link: points out of {folder}; copy the file into the folder")
        if path.is_dir():
            files.append(File(target, None, 0o755))
        elif path.is_file():
            status = path.stat()
            total += status.st_size
            if total > _MAX_FOLDER_BYTES:
                raise TaskError(f"{folder}: size: above {_MAX_FOLDER_BYTES >> 20} MB; make the files smaller")
            files.append(File(target, path.read_bytes(), 0o755 if status.st_mode & stat.S_IXUSR else 0o644))
        else:
            raise TaskError(f"{path}: file: neither a regular file nor a directory; remove it")
    return files


class _Fields:
    """Typed look-up in one TOML table."""

    def __init__(self, file: Path, table: dict[str, Any], prefix: str = ""):
        self.file, self.fields, self.prefix = file, table, prefix

    def table(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.value(key, dict, {})
        return found

    def value(self, key: str, kind: type, default: Any) -> Any:
        value = self.fields.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = {str: "text", int: "a whole number", dict: "a table"}[kind]
            raise TaskError(f"{self.file}: {self.prefix}{key}: {value!r} is not {wanted}; correct it or leave it out")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.fields.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise TaskError(f"{self.file}: {self.prefix}{key}: {value!r} is not a number above 0; correct it")
        return float(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: file: missing; every task folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: file: cannot be read as UTF-8 text ({error}); correct it") from None


def _artifact(config: Path, entry: Any) -> str:
    path = entry.get("source") if isinstance(entry, dict) else entry
    if not isinstance(path, str) or not _is_clean_path(path):
        raise TaskError(f"{config}: artifacts: {entry!r} is not an absolute path below / without '..'; correct it")
    return path.rstrip("/")


def _is_clean_path(path: str) -> bool:
    return path.startswith("/") and path.rstrip("/") != "" and not {"..", "."} & set(PurePosixPath(path).parts)


class _Image:
    """What the understood part of a Dockerfile says."""

    def __init__(self) -> None:
        self.base = ""
        self.workdir = "/app"
        self.files: list[File] = []
        self.variables: dict[str, str] = {}
        self.docker_only = ""


def _read_dockerfile(folder: Path) -> _Image:
    file = folder / "Dockerfile"
    image = _Image()
    workdir = "/"
    seen_workdir = False
    for number, line in _logical_lines(_text(file)):
        word, _, rest = line.partition(" ")
        where = f"{file}: line {number}: {word.upper()}"
        rest = rest.strip()
        match word.upper():
            case "FROM" if not image.base and " " not in rest and rest:
                image.base = rest
            case "WORKDIR" if rest and "$" not in rest:
                workdir = str(PurePosixPath(workdir) / rest)
                if not _is_clean_path(workdir):
                    raise TaskError(f"{where}: {rest!r} is not a directory below /; use an absolute path such as /app")
                seen_workdir = True
            case "ENV":
                image.variables |= _variables(where, rest)
            case "COPY" if not rest.startswith(("-", "[")) and "$" not in rest:
                image.files += _copy(where, folder, rest, workdir)
            case _:
                image.docker_only = image.docker_only or (
                    f"{where} {rest}: the local backend understands FROM, COPY, WORKDIR and ENV alone; use docker"
                )
    if not image.base:
        raise TaskError(f"{file}: FROM: missing; begin with FROM debian:bookworm")
    if seen_workdir:
        image.workdir = workdir
    if not image.base.startswith("debian:bookworm"):
        image.docker_only = image.docker_only or (
            f"{file}: FROM {image.base}: the local backend has debian:bookworm alone; use docker"
        )
    return image


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """(number of its first line, instruction), comments dropped and continued lines joined."""
    lines: list[tuple[int, str]] = []
    held, begun = "", 0
    for number, line in enumerate(text.replace("\t", " ").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun or number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        lines.append((begun, held + line))
        held, begun = "", 0
    if held:
        lines.append((begun, held))
    return lines


def _variables(where: str, rest: str) -> dict[str, str]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise TaskError(f"{where}: {rest!r}: {error}; use NAME=value") from None
    if len(words) > 1 and "=" not in words[0]:
        words = [f"{words[0]}={rest.partition(' ')[2].strip()}"]
    pairs = dict(word.partition("=")[::2] for word in words)
    if not words or not all("=" in word for word in words) or not all(name.isidentifier() for name in pairs):
        raise TaskError(f"{where}: {rest!r}: not of the form NAME=value; correct it")
    return pairs


def _copy(where: str, folder: Path, rest: str, workdir: str) -> list[File]:
    *sources, target = rest.split()
    if not sources:
        raise TaskError(f"{where}: {rest!r}: needs a source and a destination; use COPY files/ /app/")
    destination = str(PurePosixPath(workdir) / target)
    into = target.endswith("/") or target == "." or len(sources) > 1
    files: list[File] = []
    for source in sources:
        path = folder / source.lstrip("/")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TaskError(f"{where}: {source!r}: lies outside environment/; copy it into the folder")
        if path.is_dir():
            if path == folder:
                files += [f for f in read_folder(path, destination) if f.path != f"{destination}/Dockerfile"]
            else:
                files += read_folder(path, destination)
            if not any(file.path == destination for file in files) and destination != "/":
                files.insert(0, File(destination, None, 0o755))
        elif path.is_file():
            name = f"{destination.rstrip('/')}/{path.name}" if into else destination
            files.append(File(name, path.read_bytes(), 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644))
        else:
            raise TaskError(f"{where}: {source!r}: no such file in {folder}; add it or correct the line")
    return files
