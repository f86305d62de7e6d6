"""The docker backend: one container a sandbox, driven over its own standard streams.

The container's first process is a bash that restarts the agent's shell, so no exec is needed to run commands
(an exec costs 50 ms here, a command in the shell 1 to 4 ms), and that adopts and reaps orphans as `--init`
would; unlike `--init`'s, it survives an agent's `kill -9 -1`.
"""

import os
import re
import secrets
import select
import socket
import struct
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import docker
import docker.errors
import requests.exceptions
from docker.types import LogConfig, Ulimit

from . import artifacts, shell
from .archive import TooLong, pack, unpack
from .image import build_image, find_base
from .records import (
    AGENT_PROCESSES,
    ARTIFACT_BYTES,
    ARTIFACT_DEPTH,
    ARTIFACT_FILES,
    REPORT_BYTES,
    File,
    Grade,
    Result,
    SandboxError,
)
from .task import Task

HOME = "/root"
_LABEL = "rsi.owner"
_API_SECONDS = 60
_STAGE = "/.rsi"
_FILE_BYTES = 1 << 30
_OUTER = 'trap "exit 0" USR1; s=0; while :; do /bin/bash --noprofile --norc -c "$1" bash $s; s=$?; done'
_FAILURES = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)


class DockerBackend:
    """Starts containers; at most `starts` are being created at once (a two-core daemon starts 5 to 7 a second)."""

    kind = "docker"

    def __init__(self, reason: str, run: str, starts: int):
        self.reason = reason
        self.run = re.sub(r"[^A-Za-z0-9_.-]", "-", run).strip("-.") or "run"
        self.starts = threading.BoundedSemaphore(starts)
        self.execs = threading.BoundedSemaphore(2 * starts)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._build_lock = threading.Lock()
        self._images: dict[str, str] = {}
        try:
            self.client.ping()
            self._sweep()
        except _FAILURES as error:
            raise SandboxError(f"no Docker daemon answers ({error}): start one or use --sandbox local") from None

    @property
    def client(self) -> Any:
        """This thread's connection to the daemon."""
        if not hasattr(self._local, "client"):
            self._local.client = docker.from_env(timeout=_API_SECONDS)
        return self._local.client

    def start(self, task: Task) -> "DockerSandbox":
        """A sandbox with the task's environment and the agent's shell in its working directory."""
        variables = shell.environment(dict(task.variables), HOME)
        command = [*shell.SHELL, _OUTER, "bash", shell.driver(task.workdir, variables)]
        files = () if task.docker_only else task.environment
        sandbox = self._create(task, command, variables, files)
        try:
            sandbox.open_shell()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def grade(self, task: Task, left: Sequence[File]) -> Grade:
        """Run the task's tests in a clean container that holds what was `left` in place of the artifact paths."""
        tests = [File("/logs/verifier", None, 0o755), File("/tests", None, 0o755), *task.tests]
        if task.docker_only:  # the image itself holds what the artifacts replace
            roots = " ".join(f"'{path}'" for path in task.artifacts if "'" not in path)
            command = [
                "/bin/bash",
                "-c",
                f"rm -rf -- {roots}; cp -a {_STAGE}/. / && rm -rf {_STAGE}; "
                f"cd '{task.workdir}'; exec /bin/bash /tests/test.sh",
            ]
            files = [File(_STAGE + file.path, file.data, file.mode, file.mtime) for file in [*left, *tests]]
        else:
            command = ["/bin/bash", "/tests/test.sh"]
            files = [*artifacts.outside(task.environment, task.artifacts), *left, *tests]
        sandbox = self._create(task, command, shell.environment(dict(task.variables), HOME), files)
        try:
            output = sandbox.wait(task.verifier_timeout)
            sandbox.stop()
            found = {file.path: file.data for file in sandbox.entries("/logs", REPORT_BYTES, 2, cut=True)}
            return Grade(found.get("/logs/verifier/reward.txt"), found.get("/logs/verifier/ctrf.json"), output)
        finally:
            sandbox.close()

    def _create(
        self, task: Task, command: list[str], variables: dict[str, str], files: Iterable[File]
    ) -> "DockerSandbox":
        name = f"rsi-{self.run[:40]}-{secrets.token_hex(6)}"
        sandbox = None
        with self.starts:
            try:
                image = self._image(task)
                with self._lock:
                    self._live.add(name)
                self.client.containers.create(
                    image,
                    command,
                    name=name,
                    hostname="sandbox",
                    working_dir=task.workdir,
                    entrypoint=[],
                    user="root",
                    environment=variables,
                    stdin_open=True,
                    labels={_LABEL: _owner(os.getpid()), "rsi.run": self.run},
                    network_mode="bridge" if task.network else "none",
                    mem_limit=task.memory_mb << 20,
                    memswap_limit=task.memory_mb << 20,
                    pids_limit=AGENT_PROCESSES,
                    restart_policy={"Name": "no"},
                    cap_drop=["NET_RAW", "MKNOD", "AUDIT_WRITE", "SETFCAP"],
                    security_opt=["no-new-privileges"],
                    log_config=LogConfig(type="none"),
                    ulimits=[
                        Ulimit(name="fsize", soft=_FILE_BYTES, hard=_FILE_BYTES),
                        Ulimit(name="core", soft=0, hard=0),
                    ],
                )
                self.client.api.put_archive(name, "/", pack(files))
                sandbox = DockerSandbox(self, name)
                self.client.api.start(name)
                return sandbox
            except BaseException as error:
                self.remove(name)
                if sandbox:
                    sandbox.close()
                if isinstance(error, _FAILURES):
                    raise SandboxError(f"a container could not be started ({error})") from None
                raise

    def _image(self, task: Task) -> str:
        key = str(task.folder) if task.docker_only else task.base
        with self._build_lock:
            if key not in self._images:
                image = build_image(self.client, task) if task.docker_only else find_base(self.client, task.base)
                self._images[key] = image
            return self._images[key]

    def _sweep(self) -> None:
        """Remove the containers whose owning process is dead."""
        for container in self.client.containers.list(all=True, filters={"label": _LABEL}, ignore_removed=True):
            owner = container.labels[_LABEL]
            pid, _, namespace = owner.split(" ")
            if namespace == _namespace() and _owner(int(pid)) != owner:
                self.remove(container.name)

    def remove(self, name: str) -> None:
        try:
            self.client.api.remove_container(name, force=True, v=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: being removed already
                raise SandboxError(f"container {name} could not be removed ({error.explanation})") from None
        with self._lock:
            self._live.discard(name)

    def close(self) -> None:
        """Remove every container of this backend."""
        with self._lock:
            live = list(self._live)
        for name in live:
            self.remove(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DockerSandbox:
    """One container. Used by one thread at a time."""

    def __init__(self, backend: DockerBackend, name: str):
        self._backend = backend
        self._name = name
        self._closed = False
        self._shell: shell.Shell | None = None
        self._pending = b""
        self._ended = False
        raw = backend.client.api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self._stream: socket.socket = raw._sock
        self._raw = raw
        self._stream.settimeout(None)
        self._stream.setblocking(False)

    def open_shell(self) -> None:
        self._shell = shell.Shell(self, self._script)

    def run(self, command: str, timeout: float = 30.0, fresh: bool = False) -> Result:
        """Run a command in the persistent shell, or with `fresh` in a new one; `timeout` in seconds."""
        assert self._shell, "a verifier's sandbox has no shell"
        return self._shell.run(command, timeout, fresh)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """The first `limit` bytes of a regular file; links are not followed. FileNotFoundError where there is none."""
        data = self.fetch(path, limit)
        if data is None:
            raise FileNotFoundError(f"{path}: no regular file in the sandbox")
        return data

    def write(self, path: str, data: bytes) -> None:
        self._api("put_archive", "/", pack([File(path, data, mtime=int(time.time()))]))

    def freeze(self) -> None:
        """Stop every process; returns when the daemon confirms it."""
        self._api("pause")
        if not self._api("inspect_container")["State"]["Paused"]:
            raise SandboxError("the container could not be frozen")

    def thaw(self) -> None:
        self._api("unpause")

    def stop(self) -> None:
        """Kill every process; returns when the daemon confirms that the container is stopped."""
        if self._api("inspect_container")["State"]["Running"]:
            try:
                self._api("kill")
            except SandboxError:
                pass  # it ended by itself in between; what counts is the state below
            self._api("wait", timeout=_API_SECONDS)
        if self._api("inspect_container")["State"]["Running"]:
            raise SandboxError("the container could not be stopped")

    def take(self, paths: Sequence[str]) -> list[File]:
        """Directories and regular files at and below `paths`, bounded in number, bytes and depth."""
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
        """Up to `limit` bytes of a regular file, or None."""
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

    def close(self) -> None:
        """Remove the container; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._raw.close()
            self._backend.remove(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, data: bytes, deadline: float) -> None:
        self._require_open()
        view = memoryview(data)
        room = select.poll()
        room.register(self._stream, select.POLLOUT)
        while view:
            if not room.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            try:
                view = view[self._stream.send(view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise SandboxError(f"the container is dead ({error})") from None

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
        except _FAILURES as error:
            raise SandboxError(f"docker {method} failed: {error}") from None

    def _script(self, text: str, *arguments: str) -> int:
        """Exit status of a bash script run as the container's root."""
        command = ["/bin/bash", "--noprofile", "--norc", "-c", text, "bash", *arguments]
        with self._backend.execs:
            execution = self._api("exec_create", command, user="root")["Id"]
            try:
                self._backend.client.api.exec_start(execution)
                return int(self._backend.client.api.exec_inspect(execution)["ExitCode"])
            except _FAILURES as error:
                raise SandboxError(f"docker exec failed: {error}") from None

    def entries(self, path: str, room: int, depth: int, cut: bool = False) -> Iterator[File]:
        """Regular files and directories at and below `path`, read from a tar stream that ends when too long.

        `room` bytes in all are returned: longer files are left out, or cut.
        """
        self._require_open()
        try:
            chunks, _ = self._backend.client.api.get_archive(self._name, path)
        except docker.errors.NotFound:
            return
        except _FAILURES as error:
            raise SandboxError(f"docker get_archive failed: {error}") from None
        try:
            yield from unpack(chunks, path, room, depth, cut)
        except TooLong:
            return
        except (tarfile.TarError, *_FAILURES) as error:
            raise SandboxError(f"the files of {path} could not be read: {error}") from None
        finally:
            chunks.close()


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _owner(pid: int) -> str:
    """Identity of a living process: pid, start time, pid namespace; empty when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return f"{pid} {int(fields[19])} {_namespace()}"
