"""What passes between the caller, the backends and the verifier."""

from dataclasses import dataclass, field

AGENT_PROCESSES = 128  # processes and threads an agent's sandbox may hold at once
DISK_MB = 128  # size of the local backend's writable file system
OUTPUT_BYTES = 10_000  # what one command may return: half from its head, half from its tail
FLOOD_BYTES = 16 << 20  # a command that writes more is stopped with limit "output"
ARTIFACT_FILES = 10_000
ARTIFACT_BYTES = 64 << 20
ARTIFACT_DEPTH = 32
REPORT_BYTES = 1 << 20
RESULT_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/ctrf.json", "/logs/verifier/reward.json")
PART_BYTES = 4 << 20  # of a file that is searched, read at once
FIXED_TIME = 1_767_225_600  # modification time of task files (2026-01-01 UTC): listings repeat exactly


class SandboxError(Exception):
    """The machine failed (dead sandbox, verifier that could not run): never an observation, never a 0."""


class TaskError(ValueError):
    """A task folder is wrong: the message names the file, the field, the value and what to do."""


@dataclass(frozen=True)
class File:
    """A regular file, or a directory where `data` is None, at an absolute path inside a sandbox."""

    path: str
    data: bytes | None
    mode: int = 0o644
    mtime: int = FIXED_TIME


@dataclass(frozen=True)
class Result:
    """What one command gave.

    `limit` is None, "timeout" or "output"; `exit_code` is None where a limit fired; `dropped_bytes` counts
    the bytes cut from the middle of `output`. `exhausted` names what ran out while it ran, of "memory",
    "processes" and "disk".
    """

    output: str
    exit_code: int | None
    limit: str | None = None
    dropped_bytes: int = 0
    exhausted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the protected verifier found.

    `reward` is the one named "reward", the mean where several have other names; `rewards` has them all. `strict`:
    every reward >= 1 and every reported check passed. `tampered` names the paths by which an agent could have
    changed its judge (snapshot mode); then nothing was run and the reward is 0. `note` says where reward and
    report disagree, `output` what the tests said: for people, never for the verdict.
    """

    reward: float
    checks: dict[str, bool] = field(default_factory=dict)
    strict: bool = False
    seconds: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    tampered: tuple[str, ...] = ()
    note: str = ""
    output: str = field(default="", repr=False)


@dataclass(frozen=True)
class Grade:
    """Raw results of one test run: the files as they were found (None: no regular file there)."""

    reward: bytes | None
    report: bytes | None
    output: str
    rewards: bytes | None = None


@dataclass(frozen=True)
class Snapshot:
    """The whole system an agent left: the name of its image, and the paths of its judge that it changed."""

    image: str
    tampered: tuple[str, ...]
