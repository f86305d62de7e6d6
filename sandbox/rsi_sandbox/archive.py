"""Tar streams to and from containers."""

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from .records import ARTIFACT_BYTES, PART_BYTES, File

STREAM_BYTES = 4 * ARTIFACT_BYTES  # read of one stream at most, whatever it claims to hold


class TooLong(Exception):
    pass


class TarStream(io.RawIOBase):
    """File object over the chunks of a tar stream, ending in TooLong after `room` bytes."""

    def __init__(self, chunks: Iterator[bytes], room: float):
        self.chunks, self.room = chunks, room
        self.buffer, self.at = b"", 0

    def read(self, size: int = -1) -> bytes:
        while len(self.buffer) < self.at + size and (chunk := next(self.chunks, b"")):
            self.buffer, self.at = self.buffer[self.at :] + chunk, 0
            self.room -= len(chunk)
            if self.room < 0:
                raise TooLong
        data = self.buffer[self.at : self.at + size]
        self.at += len(data)
        return data


def pack(files: Iterable[File]) -> bytes:
    """A tar archive of the files, owned by root, with every parent directory."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for file in files:
            member = tarfile.TarInfo(file.path.lstrip("/"))
            member.mode, member.mtime = file.mode, file.mtime
            if file.data is None:
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            else:
                member.size = len(file.data)
                archive.addfile(member, io.BytesIO(file.data))
    return stream.getvalue()


def unpack(chunks: Iterator[bytes], path: str, room: int, depth: int, cut: bool) -> Iterator[File]:
    """Regular files and directories of a tar stream whose root stands for `path`; raises TooLong.

    With `cut` each file's first `room` bytes; else `room` bytes in all, files that do not fit left out.
    """
    with tarfile.open(fileobj=TarStream(chunks, STREAM_BYTES), mode="r|", bufsize=1 << 16) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts[1:]
            target = str(PurePosixPath(path).joinpath(*parts))
            if len(parts) > depth or ".." in parts:
                continue
            if member.isdir():
                yield File(target, None, member.mode & 0o777 | 0o700, int(member.mtime))
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and (cut or member.size <= room):
                content = archive.extractfile(member)
                data = content.read(room) if content else b""
                room -= 0 if cut else len(data)
                yield File(target, data, member.mode & 0o777, int(member.mtime))


def contents(chunks: Iterator[bytes]) -> Iterator[tuple[str, int, bytes]]:
    """(path, size, part) of every regular file of a tar stream of "/", unbounded; an empty file is one empty part."""
    with tarfile.open(fileobj=TarStream(chunks, float("inf")), mode="r|", bufsize=1 << 16) as archive:
        for member in archive:
            if content := archive.extractfile(member) if member.isreg() else None:
                path = str(PurePosixPath("/", member.name))
                yield path, member.size, content.read(PART_BYTES)
                while part := content.read(PART_BYTES):
                    yield path, member.size, part
