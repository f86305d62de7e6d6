"""The one interface of both backends."""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from .pty import Screen
from .records import File, Grade, Result, Snapshot
from .task import Task


class Sandbox(Protocol):
    """A machine for one attempt. Used by one thread at a time; every method raises SandboxError when it is dead."""

    def run(self, command: str, timeout: float = 30.0, fresh: bool = False) -> Result:
        """Run a command in the persistent shell, or with `fresh` in a new one; `timeout` in seconds."""

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """The first `limit` bytes of a regular file; FileNotFoundError where there is none. Links are not followed."""

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file at an absolute path (else ValueError), making its directories."""

    def freeze(self) -> None:
        """Stop every process of the agent; returns when that is confirmed."""

    def thaw(self) -> None:
        """Let the processes go on."""

    def stop(self) -> None:
        """Kill every process for good; returns when that is confirmed. Files stay readable until `close`."""

    def take(self, paths: Sequence[str]) -> list[File]:
        """Directories and regular files at and below `paths`, bounded in number, bytes and depth."""

    def contents(self) -> Iterator[tuple[str, int, bytes]]:
        """(path, size, part) of every regular file outside /proc, /sys, /dev and, in `local`, the host's own read-only
        system; a file's parts, at most PART_BYTES each, follow each other, and an empty file has one. Unbounded.
        """

    def snapshot(self, task: Task) -> Snapshot:
        """The whole system as it is now; the sandbox is stopped or frozen."""

    def terminal(self, rows: int = 40, columns: int = 160) -> Screen:
        """A login shell on a pseudo-terminal of its own, beside the persistent shell; ends with the sandbox."""

    def close(self) -> None:
        """Remove the sandbox; harmless when repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Backend(Protocol):
    """Makes sandboxes. Any number of threads may use one backend; `reason` says why it was chosen."""

    kind: str
    reason: str

    def start(self, task: Task) -> Sandbox:
        """A sandbox with the task's environment and the agent's shell in its working directory."""

    def grade(self, task: Task, left: Sequence[File], snapshot: Snapshot | None = None) -> Grade:
        """Run the task's tests: in the clean environment, what was `left` in place of the artifact paths, or in
        the `snapshot`, which this removes.
        """

    def forget(self, snapshot: Snapshot) -> None:
        """Remove a snapshot."""

    def close(self) -> None:
        """Remove every sandbox of this backend."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
