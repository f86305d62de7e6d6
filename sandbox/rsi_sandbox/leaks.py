"""What an agent could find of its task's tests and solution in the sandbox that it gets (`check`).

Searched are the regular files of the started sandbox (`Sandbox.contents`) and the objects of every git repository among
them, reachable or not. One holds a secret when it is the same, blanks at the ends apart, or when it has at least three
of the secret's long lines, and more than half of them. Archives are not opened.
"""

import hashlib
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from .interface import Sandbox
from .records import PART_BYTES
from .task import Task

BYTES, SECONDS = 32 << 30, 600.0  # of one search, inflated git objects included
GIT_BYTES = 256 << 20  # of one pack, and of one object
_LONG = 12  # bytes of a long line; what many programs say is none
_COMMON = re.compile(rb"#!.*|set [-+].*|import [\w ,.]+|from [\w.]+ import .*|if __name__ == .*")
_GIT = re.compile(r"(.*)/objects/(?:(?P<loose>[0-9a-f]{2}/[0-9a-f]{38,62})|(?P<pack>pack/.*)\.(?:idx|pack))")


class _Unfinished(Exception):
    pass


def leaks(sandbox: Sandbox, task: Task) -> list[str]:
    """Each as "<where> holds /tests/<name>" (or /solution/<name>); also what could not be searched, and why."""
    search = _Search(task)
    halves: dict[str, bytes] = {}  # packs that still lack their index, and the other way round
    path = ""
    try:
        for path, parts in groupby(sandbox.contents(), key=itemgetter(0)):
            git = _GIT.fullmatch(path)
            data = search.look(path, parts, keep=git is not None)
            try:
                for where, content in _git_objects(git, data, halves) if git and data else ():
                    search.look(where, [(where, len(content), content)])
            except (ValueError, LookupError, RecursionError, struct.error, zlib.error) as error:
                search.found.append(f"{path} could not be searched: {error!r}")
    except _Unfinished as error:
        search.found.append(f"the search ended at {path}: {error}")
    return search.found + [f"{path} could not be searched: its index or pack is missing" for path in halves]


class _Search:
    """The secrets of one task, and where they were found."""

    def __init__(self, task: Task):
        self.room, self.deadline = BYTES, time.monotonic() + SECONDS
        self.found: list[str] = []
        self.lines: dict[str, set[bytes]] = {}  # long lines of each secret
        self.digests: dict[tuple[int, bytes], str] = {}  # by size and digest
        public = {line.strip() for step in (task, *task.steps) for line in step.instruction.encode().split(b"\n")}
        for step in task.steps or (task,):
            for file in (*step.tests, *step.solution):
                name = f"{file.path} of {step.name}" if task.steps else file.path
                plain = (file.data or b"").strip()
                if len(plain) >= _LONG and plain not in public:
                    for same in (file.data or b"", plain, plain + b"\n"):
                        self.digests[len(same), hashlib.sha256(same).digest()] = name
                lines = {line.strip() for line in plain.split(b"\n")} - public
                self.lines[name] = {line for line in lines if len(line) >= _LONG and not _COMMON.fullmatch(line)}
        self.sizes = {size for size, _ in self.digests}
        self.all_lines = frozenset().union(*self.lines.values())

    def look(self, where: str, parts: Iterable[tuple[str, int, bytes]], keep: bool = False) -> bytes:
        """Search the parts of one file; returns them together where they are to be kept."""
        seen: set[bytes] = set()
        kept, digest, size, rest = [], hashlib.sha256(), 0, b""
        for _, size, part in parts:
            self.room -= len(part)
            if self.room < 0 or time.monotonic() > self.deadline:
                raise _Unfinished(f"above {BYTES >> 30} GiB or {SECONDS:g} s")
            if size in self.sizes:
                digest.update(part)
            if keep and size <= GIT_BYTES:
                kept.append(part)
            *lines, rest = (rest + part).split(b"\n")
            seen.update(self.all_lines.intersection(map(bytes.strip, lines)))
            rest = rest[-PART_BYTES:]
        seen.update(self.all_lines.intersection([rest.strip()]))
        held = {self.digests.get((size, digest.digest()), "")} - {""}
        for name, long in self.lines.items() if len(seen) >= 3 else ():
            hits = len(long & seen)
            if hits >= 3 and 2 * hits > len(long):
                held.add(name)
        self.found += [f"{where} holds {name}" for name in sorted(held)]
        if keep and size > GIT_BYTES:
            self.found.append(f"{where} could not be searched: above {GIT_BYTES >> 20} MiB")
        return b"".join(kept)


def _git_objects(git: re.Match[str], data: bytes, halves: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the object in a loose object's file or, once both its files have come, of those in a pack."""
    if git["loose"]:
        yield f"git object {git['loose'].replace('/', '')[:12]} of {git[1]}", _inflate(data).partition(b"\0")[2]
        return
    halves[git[0]] = data
    index, pack = (f"{git[1]}/objects/{git['pack']}.{ending}" for ending in ("idx", "pack"))
    if index in halves and pack in halves:
        for name, content in _unpack(halves.pop(index), halves.pop(pack)):
            yield f"git object {name[:12]} of {git[1]}", content


def _unpack(index: bytes, pack: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a pack's objects. Source: git's documentation, gitformat-pack (index version 2)."""
    if index[:8] != b"\xfftOc\0\0\0\2":
        raise ValueError("its index is not of version 2")
    (count,) = struct.unpack_from(">I", index, 1028)
    width = (len(index) - 1032 - 8 * count) // (count + 2)  # of a name: 20 or 32 bytes
    starts = struct.unpack_from(f">{count}I", index, 1032 + (width + 4) * count)
    where = {index[1032 + width * n : 1032 + width * (n + 1)]: start for n, start in enumerate(starts)}
    ordered = sorted(starts)
    ends = dict(zip(ordered, [*ordered[1:], len(pack) - width], strict=True))

    @lru_cache(maxsize=16)
    def content(start: int) -> bytes:
        at, kind = start, pack[start] >> 4 & 7
        while pack[at] & 128:  # the size
            at += 1
        at += 1
        if kind == 6:  # the difference to the object that begins so far before
            distance = pack[at] & 127
            while pack[at] & 128:
                at += 1
                distance = (distance + 1) << 7 | pack[at] & 127
            return _apply(content(start - distance), _inflate(pack[at + 1 : ends[start]]))
        if kind == 7:  # the difference to the object of that name
            return _apply(content(where[pack[at : at + width]]), _inflate(pack[at + width : ends[start]]))
        return _inflate(pack[at : ends[start]])

    for name, start in sorted(where.items(), key=itemgetter(1)):
        yield name.hex(), content(start)


def _apply(base: bytes, delta: bytes) -> bytes:
    """`base` changed as a pack's delta says."""
    at, whole = 0, bytearray()
    for _ in ("size of the base", "size of the whole"):
        while delta[at] & 128:
            at += 1
        at += 1
    while at < len(delta):
        code = delta[at]
        at += 1
        if code & 128:  # copy from the base; absent bytes of offset and length are 0
            number = 0
            for bit in range(7):
                if code >> bit & 1:
                    number |= delta[at] << 8 * bit
                    at += 1
            start, length = number & 0xFFFFFFFF, number >> 32 or 0x10000
            whole += base[start : start + length]
        else:
            whole += delta[at : at + code]
            at += code
        if len(whole) > GIT_BYTES:
            raise ValueError(f"an object is above {GIT_BYTES >> 20} MiB")
    return bytes(whole)


def _inflate(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    whole = stream.decompress(data, GIT_BYTES)
    if not stream.eof:
        raise ValueError(f"an object is cut short, or above {GIT_BYTES >> 20} MiB")
    return whole
