"""Reading what an agent left behind, without following, opening or believing anything it may have planted."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from .records import ARTIFACT_BYTES, ARTIFACT_DEPTH, ARTIFACT_FILES, PART_BYTES, File

NO_FOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SEARCH_DEPTH = 200


def outside(files: Iterable[File], roots: Sequence[str]) -> list[File]:
    """The files that are neither at nor below any of `roots`: what artifacts do not replace."""
    return [file for file in files if not any(file.path == root or file.path.startswith(f"{root}/") for root in roots)]


def fetch(root: int, path: str, limit: int) -> bytes | None:
    """Up to `limit` bytes of a regular file reached from the directory descriptor `root` without links, or None."""
    for _, status, descriptor in _entries(root, path, 0):
        if stat.S_ISREG(status.st_mode):
            return read_at_most(descriptor, limit)
    return None


def take(root: int, paths: Sequence[str]) -> list[File]:
    """Directories and regular files at and below `paths`, bounded in number, bytes and depth."""
    files: list[File] = []
    room = ARTIFACT_BYTES
    for path, status, descriptor in (entry for top in paths for entry in _entries(root, top, ARTIFACT_DEPTH)):
        if len(files) == ARTIFACT_FILES:
            break
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            continue  # no text: it cannot be placed anywhere else
        mode, mtime = status.st_mode & 0o777, int(status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            files.append(File(path, None, mode | 0o700, mtime))
        elif status.st_size <= room:
            data = read_at_most(descriptor, room)
            room -= len(data)
            files.append(File(path, data, mode, mtime))
    return files


def contents(root: int) -> Iterator[tuple[str, int, bytes]]:
    """(path, size, part) of every regular file on the file system of `root`; an empty file is one empty part."""
    for path, status, descriptor in _walk(root, ".", "", _SEARCH_DEPTH, os.stat(".", dir_fd=root).st_dev):
        if stat.S_ISREG(status.st_mode):
            yield path, status.st_size, os.read(descriptor, PART_BYTES)
            while part := os.read(descriptor, PART_BYTES):
                yield path, status.st_size, part


def _entries(root: int, path: str, depth: int) -> Iterator[tuple[str, os.stat_result, int]]:
    """What `_walk` gives at and below the absolute `path` in `root`."""
    try:
        parent = open_directory(root, str(PurePosixPath(path).parent))
    except OSError:
        return
    try:
        yield from _walk(parent, PurePosixPath(path).name, path, depth)
    finally:
        os.close(parent)


def _walk(
    parent: int, name: str, path: str, depth: int, device: int | None = None
) -> Iterator[tuple[str, os.stat_result, int]]:
    """(path, status, descriptor open until the next) of the directories and regular files at and `depth` levels
    below `name` in the directory `parent`, on the file system `device` where one is given.
    """
    try:
        kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            return
        descriptor = os.open(name, NO_FOLLOW, dir_fd=parent)
    except OSError:
        return
    try:
        status = os.fstat(descriptor)
        if stat.S_IFMT(status.st_mode) != stat.S_IFMT(kind) or device not in (None, status.st_dev):
            return
        yield path, status, descriptor
        if stat.S_ISDIR(status.st_mode) and depth:
            for entry in sorted(os.listdir(descriptor)):  # noqa: PTH208  (pathlib knows no descriptors)
                yield from _walk(descriptor, entry, f"{path}/{entry}", depth - 1, device)
    finally:
        os.close(descriptor)


def open_directory(root: int, path: str) -> int:
    """A descriptor of the directory at absolute `path` below `root`, refusing links on the way."""
    current = os.dup(root)
    for part in PurePosixPath(path).parts[1:]:
        try:
            following = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


def read_at_most(descriptor: int, limit: int) -> bytes:
    parts = []
    while limit > 0 and (part := os.read(descriptor, min(limit, 1 << 20))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)
