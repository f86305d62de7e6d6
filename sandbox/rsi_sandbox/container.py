"""One container of the docker backend, driven over its own standard streams.

The container's first process is a bash that restarts the agent's shell, so no exec is needed to run commands
(an exec costs 50 ms here, a command in the shell 1 to 4 ms), and that adopts and reaps orphans as `--init`
would; unlike `--init`'s, it survives an agent's `kill -9 -1`.
"""

import re
import select
import socket
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import docker.errors
import requests.exceptions

from . import pty, shell
from .archive import TooLong, contents, pack, unpack
from .records import ARTIFACT_BYTES, ARTIFACT_DEPTH, ARTIFACT_FILES, File, SandboxError, Snapshot
from .task import Task

if TYPE_CHECKING:
    from .daemon import DockerBackend

# Where no process is to be had for the shell, bash ends with a status: then it begins again in its own place. Told to
# end (USR1, or the daemon's TERM) it has none.
OUTER = (
    'trap "exit 0" USR1; trap \'(($?)) && exec /bin/bash --noprofile --norc -c "$BASH_EXECUTION_STRING" bash "$1"\' '
    'EXIT; s=0; while :; do /bin/bash --noprofile --norc -c "$1" bash $s; s=$?; done'
)
API_SECONDS = 60
_Parsed = TypeVar("_Parsed")
FAILURES = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)

# By these an agent could change who judges it: programs that exist, names that tests call, the loader, Python's hooks.
_PROGRAMS = (
    r"bash|sh|dash|env|cat|cp|rm|mv|ls|test|\[|cmp|diff|grep|sed|awk|mawk|gawk|head|tail|sort|tr|cut|wc|find|xargs|"
    r"python[\d.]*|pytest|py\.test|uvx?|pip[\d.]*|curl|wget|apt(-get)?|git|make|gcc|g\+\+|node|npm|java|go|cargo|rustc|timeout"
)
_TAMPERED = (
    ("CD", re.compile(r"(/usr)?/s?bin/[^/]+|(/usr)?/lib(64|32|x32)?/.*(\.so[.\d]*|/python3[^/]*/.*\.py)")),
    (
        "CAD",
        re.compile(r"/etc/ld\.so\.(preload|conf.*)|.*/(site|user)customize\.py|.*/(site|dist)-packages/[^/]*\.pth"),
    ),
    ("CAD", re.compile(rf"(/usr(/local)?|/root/\.local)?/s?bin/({_PROGRAMS})|/root/\.local/bin/env")),
    ("CAD", re.compile(r".*/(site|dist)-packages/(_?pytest|pluggy|iniconfig)(/.*|\.py)")),
)
_EXHAUSTED = r"""
read_count() { local k v; while read -r k v; do [[ $k == "$2" ]] && n=$v; done <"$1"; } 2>/dev/null
n=0; read_count /sys/fs/cgroup/memory/memory.oom_control oom_kill; read_count /sys/fs/cgroup/memory.events oom_kill
memory=$n n=0
read_count /sys/fs/cgroup/pids/pids.events max; read_count /sys/fs/cgroup/pids.events max
read -r free size < <(stat -f -c '%a %S' /)
exit $(((memory > 0) + 2 * (n > 0) + 4 * (free * size < 1048576)))
"""


class DockerSandbox(shell.Machine):
    """One container. Used by one thread at a time."""

    def __init__(self, backend: "DockerBackend", name: str, user: str, variables: dict[str, str]):
        self._backend, self._name, self._variables = backend, name, variables
        self._user = user  # no other's processes may be looked into, not even by root
        self._closed = False
        self.shell: shell.Shell | None = None
        self._pending = b""
        self._ended = False
        self._terminals: list[pty.Screen] = []
        self._raw = backend.client.api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self._stream: socket.socket = self._raw._sock
        self._stream.setblocking(False)

    def put(self, file: File) -> None:
        self._api("put_archive", "/", pack([file]))

    def freeze(self) -> None:
        """Stop every process; returns when the daemon confirms it."""
        self._api("pause")
        if not self._api("inspect_container")["State"]["Paused"]:
            raise SandboxError("the container could not be frozen")

    def thaw(self) -> None:
        self._api("unpause")

    def stop(self) -> None:
        """Kill every process; returns when the daemon confirms that the container is stopped."""
        try:
            if self.shell or not self._ended:  # a verifier's end was heard
                self._api("kill")
        except SandboxError:
            pass  # it ended by itself in between; what counts is the daemon's word below
        try:
            self._api("wait", timeout=API_SECONDS)
        except SandboxError as error:
            raise SandboxError(f"the container could not be stopped ({error})") from None

    def take(self, paths: Sequence[str]) -> list[File]:
        files: list[File] = []
        room = ARTIFACT_BYTES
        for path in paths:
            for file in self.entries(path, room, ARTIFACT_DEPTH):
                if len(files) == ARTIFACT_FILES:
                    return files
                room -= len(file.data or b"")
                files.append(file)
        return files

    def fetch(self, path: str, limit: int) -> bytes | None:
        return next((file.data for file in self.entries(path, limit, 0, cut=True) if file.data is not None), None)

    def wait(self, timeout: float) -> str:
        """The output of the container's process once it has ended."""
        collected = shell.Output()
        deadline = time.monotonic() + timeout
        while not self._ended:
            if (remaining := deadline - time.monotonic()) <= 0:
                raise SandboxError(f"the tests did not end within {timeout:g} s; they wrote: {collected.text()[0]!r}")
            collected.feed(self._frames(remaining))
        return collected.text()[0]

    def snapshot(self, task: Task) -> Snapshot:
        """The container's files as an image of their own, and what in them could change the judge."""
        words = set(re.findall(r"[\w.+-]+", b"".join(file.data or b"" for file in task.tests).decode(errors="replace")))
        searched = {**self._variables, **dict(task.verifier_variables)}["PATH"].split(":")
        own = set(searched) - set(shell.PATH.split(":"))  # folders that the image puts on PATH

        def judges(kind: str, path: str) -> bool:
            folder, _, name = path.rpartition("/")
            return (
                any(kind in kinds and found.fullmatch(path) for kinds, found in _TAMPERED)
                or (folder in own and (name in words or re.fullmatch(_PROGRAMS, name) is not None))
                or any(f"{place}/".startswith(f"{path}/") for place in own)
                or (path.startswith("/usr/local/") and "/bin/" in path and name in words)
            )

        changes = [("CAD"[entry["Kind"]], entry["Path"]) for entry in self._api("diff") or ()]
        parents = {path.rpartition("/")[0] for _, path in changes}  # a folder counts as changed with what is in it
        tampered = [path for kind, path in changes if path not in parents and judges(kind, path)]
        labels = " ".join(f'{name}="{value}"' for name, value in self._backend.labels.items())
        image = self._api("commit", pause=False, changes=[f"LABEL {labels}"])["Id"]
        return Snapshot(image, tuple(sorted(tampered)))

    def terminal(self, rows: int = 40, columns: int = 160) -> pty.Screen:
        api = self._backend.client.api
        variables = {**self._variables, "TERM": "xterm-256color", "LINES": "", "COLUMNS": ""}
        with self._backend.execs:
            execution = self._api(
                "exec_create", ["/bin/bash", "-l"], tty=True, stdin=True, environment=variables, user=self._user
            )["Id"]
            try:
                raw = api.exec_start(execution, tty=True, socket=True)
                api.exec_resize(execution, rows, columns)
            except FAILURES as error:
                raise SandboxError(f"docker exec failed: {error}") from None
        screen = pty.Screen(raw)
        self._terminals.append(screen)
        return screen

    def exhausted(self, suspected: set[str]) -> tuple[str, ...]:
        """By the kernel's own counts since the container's start."""
        flags = self.script(_EXHAUSTED)
        bits = {"memory": 1, "processes": 2, "disk": 4}
        return tuple(sorted(name for name in suspected if flags & bits[name]))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for screen in self._terminals:
                screen.close()
            self._stream.close()
            self._raw.close()
            self._backend.remove(self._name)

    def send(self, data: bytes, deadline: float) -> None:
        self._require_open()
        shell.write_all(self._stream.fileno(), data, deadline)

    def receive(self, seconds: float) -> bytes:
        self._require_open()
        data = self._frames(seconds)
        if self._ended and not data:
            raise SandboxError("the container is dead")
        return data

    def _frames(self, seconds: float) -> bytes:
        """Output that has arrived; docker frames it as stream (1 byte), 3 zero bytes, length (4 bytes), data."""
        ready = select.poll()
        ready.register(self._stream, select.POLLIN)
        if not ready.poll(max(0.0, seconds) * 1000):
            return b""
        try:
            data = self._stream.recv(1 << 16)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._ended = True
        self._pending += data
        parts = []
        while len(self._pending) >= 8:
            size = struct.unpack(">I", self._pending[4:8])[0]
            if len(self._pending) < 8 + size:
                break
            parts.append(self._pending[8 : 8 + size])
            self._pending = self._pending[8 + size :]
        return b"".join(parts)

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")

    def _api(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._require_open()
        try:
            return getattr(self._backend.client.api, method)(self._name, *arguments, **options)
        except FAILURES as error:
            raise SandboxError(f"docker {method} failed: {error}") from None

    def script(self, text: str, *arguments: str) -> int:
        command = ["/bin/bash", "--noprofile", "--norc", "-c", f"echo begun\n{text}", "bash", *arguments]
        deadline = time.monotonic() + API_SECONDS
        while True:
            with self._backend.execs:
                execution = self._api("exec_create", command, user=self._user)["Id"]
                try:
                    output = self._backend.client.api.exec_start(execution)
                    status = int(self._backend.client.api.exec_inspect(execution)["ExitCode"])
                except FAILURES as error:
                    raise SandboxError(f"docker exec failed: {error}") from None
            # Where the agent holds every process that the container may have, one is free only now and then, and the
            # runtime that finds none ends with a status (126, 2) that could be the script's own.
            if output.startswith(b"begun\n"):
                return status
            if time.monotonic() > deadline:
                raise SandboxError(f"docker exec could not start a process: {output.decode(errors='replace')[:200]!r}")

    def entries(self, path: str, room: int, depth: int, cut: bool = False) -> Iterator[File]:
        """Regular files and directories at and below `path`, as `unpack` gives them."""
        return self._archive(path, lambda chunks: unpack(chunks, path, room, depth, cut))

    def contents(self) -> Iterator[tuple[str, int, bytes]]:
        return self._archive("/", contents)

    def _archive(self, path: str, parse: Callable[[Iterator[bytes]], Iterator[_Parsed]]) -> Iterator[_Parsed]:
        """What `parse` makes of the tar stream of `path`, up to where that gets too long."""
        self._require_open()
        try:
            chunks, _ = self._backend.client.api.get_archive(self._name, path)
        except docker.errors.NotFound:
            return
        except FAILURES as error:
            raise SandboxError(f"docker get_archive failed: {error}") from None
        try:
            yield from parse(chunks)
        except TooLong:
            return
        except (tarfile.TarError, *FAILURES) as error:
            raise SandboxError(f"the files of {path} could not be read: {error}") from None
        finally:
            chunks.close()
