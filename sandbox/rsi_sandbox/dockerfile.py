"""The part of a Dockerfile that needs no build: FROM, COPY, WORKDIR and ENV. Anything else is left to docker."""

import re
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .records import File, TaskError

BASE = "rsi-base:bookworm"  # made or tagged by `python -m rsi_sandbox image`
# Images that another one, made here, may stand in for: by the beginning of the name. `--base NAME=LOCAL` adds to it.
STAND_INS = {"debian:bookworm": BASE}
_MAX_FOLDER_BYTES = 256 << 20


def read_text(path: Path) -> str:
    """The file's text, lines ended by newlines alone."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: file: missing; every task folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: file: cannot be read as UTF-8 text ({error}); correct it") from None


def is_clean_path(path: str) -> bool:
    """Whether the path is absolute, below / and without '.' and '..'."""
    return path.startswith("/") and path.rstrip("/") != "" and not {"..", "."} & set(PurePosixPath(path).parts)


def check_links(folder: Path) -> None:
    """Refuse every link of a task folder that leads to anything but a regular file in it."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(root)):
            raise TaskError(f"{path}: link: leads to no regular file in {folder}; put a copy in its place")


def read_folder(folder: Path, destination: str) -> list[File]:
    """The files under `folder` as they are placed below `destination`; links are followed (see `check_links`)."""
    files: list[File] = []
    total = 0
    for path in sorted(folder.rglob("*")):
        target = f"{destination.rstrip('/')}/{path.relative_to(folder).as_posix()}"
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


@dataclass
class Image:
    """What the understood part of a Dockerfile says. Where there is more to it (`docker_only` says what), docker
    builds it, and of all this `workdir` alone counts: the last stage's, or "" where that names none.
    """

    base: str = ""
    workdir: str = ""
    files: list[File] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    docker_only: str = ""


def read_dockerfile(folder: Path) -> Image:
    file = folder / "Dockerfile"
    image = Image()
    if (folder / ".dockerignore").exists():
        image.docker_only = f"{folder / '.dockerignore'}: file: the local backend knows no such file; use docker"
    workdir, known = "/", dict[str, str]()
    for number, line in _logical_lines(read_text(file)):
        word, _, rest = line.partition(" ")
        where = f"{file}: line {number}: {word.upper()}"
        rest = rest.strip()
        plain = not image.docker_only and rest != "" and "$" not in rest and rest[0] not in "-["
        match word.upper():
            case "FROM" if plain and not image.base and " " not in rest:
                image.base = rest
            case "WORKDIR":
                path = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], found[0]), rest.strip("\"'"))
                workdir = str(PurePosixPath(workdir) / path)
                if not is_clean_path(workdir) or "$" in workdir:
                    raise TaskError(f"{where}: {rest!r} is not a directory below /; use an absolute path such as /app")
                image.workdir = workdir
            case "ENV" if plain:
                image.variables |= _variables(where, rest)
                known.update(image.variables)
            case "COPY" if plain and not set("*?[") & set(rest):
                image.files += _copy(where, folder, rest, workdir)
            case name:
                if name == "FROM":  # a further stage
                    image.base, image.workdir, workdir = image.base or rest, "", "/"
                elif name in ("ENV", "ARG"):
                    known.update((n, v.strip("\"'")) for n, v in re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", rest))
                image.docker_only = image.docker_only or (
                    f"{where} {rest}: the local backend understands FROM, COPY, WORKDIR and ENV alone; use docker"
                )
    if not image.base:
        raise TaskError(f"{file}: FROM: missing; begin with FROM debian:bookworm")
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
            own = f"{destination}/Dockerfile" if path == folder else ""
            files += [file for file in read_folder(path, destination) if file.path != own]
            if not any(file.path == destination for file in files) and destination != "/":
                files.insert(0, File(destination, None, 0o755))
        elif path.is_file():
            name = f"{destination.rstrip('/')}/{path.name}" if into else destination
            files.append(File(name, path.read_bytes(), 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644))
        else:
            raise TaskError(f"{where}: {source!r}: no such file in {folder}; add it or correct the line")
    return files
