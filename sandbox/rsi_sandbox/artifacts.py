"""Reading what an agent left behind, without following, opening or believing anything it may have planted."""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from .records import ARTIFACT_BYTES, ARTIFACT_DEPTH, ARTIFACT_FILES, File

NO_FOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def outside(files: Iterable[File], roots: Sequence[str]) -> list[File]:
    """The files that are neither at nor below any of `roots`: what artifacts do not replace."""
    return [file for file in files if not any(file.path == root or file.path.startswith(f"{root}/") for root in roots)]


def fetch(root: int, path: str, limit: int) -> bytes | None:
    """Up to `limit` bytes of a regular file reached from the directory descriptor `root` without links, or None."""
    try:
        parent = open_directory(root, str(PurePosixPath(path).parent))
        try:
            descriptor = os.open(PurePosixPath(path).name, NO_FOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    except OSError:
        return None
    try:
        return read_at_most(descriptor, limit) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


class Taker:
    """Reads files below a directory descriptor, following no link and opening nothing but regular files."""

    def __init__(self, root: int):
        self.root = root
        self.files: list[File] = []
        self.room = ARTIFACT_BYTES

    def take(self, paths: Sequence[str]) -> list[File]:
        for path in paths:
            name = PurePosixPath(path).name
            try:
                parent = open_directory(self.root, str(PurePosixPath(path).parent))
            except OSError:
                continue
            try:
                self._entry(parent, name, path, 0)
            finally:
                os.close(parent)
        return self.files

    def _entry(self, parent: int, name: str, path: str, depth: int) -> None:
        if len(self.files) >= ARTIFACT_FILES or depth > ARTIFACT_DEPTH:
            return
        try:
            path.encode()
            kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                return
            descriptor = os.open(name, NO_FOLLOW, dir_fd=parent)
        except (OSError, UnicodeEncodeError):
            return
        try:
            status = os.fstat(descriptor)
            mode, mtime = status.st_mode & 0o777, int(status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                self.files.append(File(path, None, mode | 0o700, mtime))
                for entry in sorted(os.listdir(descriptor)):  # noqa: PTH208  (pathlib knows no descriptors)
                    self._entry(descriptor, entry, f"{path}/{entry}", depth + 1)
            elif stat.S_ISREG(status.st_mode) and status.st_size <= self.room:
                data = read_at_most(descriptor, self.room)
                self.room -= len(data)
                self.files.append(File(path, data, mode, mtime))
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
