"""Run and verify terminal tasks: two backends behind one interface, and a protected verifier."""

from types import ModuleType
from typing import Literal

from .interface import Backend, Sandbox
from .local import LocalBackend
from .records import File, Result, SandboxError, TaskError, Verdict
from .task import Task, load_task
from .verifier import judge, verify

__all__ = [
    "Backend",
    "File",
    "Result",
    "Sandbox",
    "SandboxError",
    "Task",
    "TaskError",
    "Verdict",
    "judge",
    "load_task",
    "open_backend",
    "verify",
]


def open_backend(kind: Literal["local", "docker", "auto"], run: str, *, starts: int = 2) -> Backend:
    """Open a backend for the run named `run`; at most `starts` sandboxes are being started at once.

    "auto" takes docker where a daemon answers, else local; `.reason` says why. Leftovers of dead owners are
    removed here. Raises SandboxError, in one line, where the backend cannot work on this machine.
    """
    if kind == "local":
        return LocalBackend("asked for", starts)
    if kind not in ("docker", "auto"):
        raise ValueError(f"sandbox backend {kind!r} is unknown: use 'local', 'docker' or 'auto'")
    try:
        reason = "asked for" if kind == "docker" else "a Docker daemon answers"
        backend: Backend = docker_modules().DockerBackend(reason, run, starts)
        return backend
    except SandboxError as error:
        if kind == "docker":
            raise
        return LocalBackend(f"{error}".rpartition(": ")[0], starts)


def docker_modules() -> ModuleType:
    """`daemon`, imported with all that needs the docker package only here: that takes 0.2 s, and may be absent."""
    try:
        from . import daemon
    except ModuleNotFoundError as error:
        raise SandboxError(f"the Python package {error.name} is missing: install it, or use --sandbox local") from None
    return daemon
