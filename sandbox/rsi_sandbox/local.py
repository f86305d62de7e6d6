"""The local backend: Linux namespaces, no daemon. What it isolates and what it does not: see the README."""

import contextlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import artifacts, pty, shell
from .interface import Backend
from .records import (
    AGENT_PROCESSES,
    DISK_MB,
    REPORT_BYTES,
    RESULT_FILES,
    File,
    Grade,
    SandboxError,
    Snapshot,
    TaskError,
)
from .task import Task

HOME = "/home/agent"
_ANSWER_SECONDS = 60.0


class LocalBackend(Backend):
    """Starts sandboxes through one small helper process, begun here; at most `starts` are being built at once."""

    kind = "local"

    def __init__(self, reason: str, starts: int):
        self.reason = reason
        self._starts = threading.BoundedSemaphore(starts)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("_spawner.py")
        with theirs:
            self._spawner = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"LC_ALL": "C"},
                cwd="/",
            )
        self._control.settimeout(_ANSWER_SECONDS)
        answer = self._control.recv(4096).decode()
        if answer != "ok":
            self.close()
            raise SandboxError(
                f"the local sandbox needs user namespaces, which this kernel refuses ({answer or 'helper died'}): "
                "use --sandbox docker"
            )

    def start(self, task: Task) -> "LocalSandbox":
        variables = shell.environment(dict(task.variables), HOME)
        arguments = [*shell.SHELL, shell.driver(task.workdir, variables), "bash"]
        sandbox = self._build(task, task.environment, arguments, variables, agent=True)
        shell.begin(sandbox, task.healthcheck)
        return sandbox

    def grade(self, task: Task, left: Sequence[File], snapshot: Snapshot | None = None) -> Grade:
        kept = artifacts.outside(task.environment, task.artifacts)
        files = [*kept, *left, File("/logs/verifier", None, 0o755), File("/tests", None, 0o755), *task.tests]
        variables = shell.environment({**dict(task.variables), **dict(task.verifier_variables)}, "/root")
        with self._build(task, files, ["/bin/bash", "/tests/test.sh"], variables, agent=False) as sandbox:
            output = sandbox.wait(task.verifier_timeout)
            sandbox.stop()
            reward, report, rewards = (sandbox.fetch(path, REPORT_BYTES) for path in RESULT_FILES)
            return Grade(reward, report, output, rewards)

    def forget(self, snapshot: Snapshot) -> None:
        raise AssertionError("the local backend makes no snapshots")

    def _build(
        self, task: Task, files: Iterable[File], arguments: list[str], variables: dict[str, str], agent: bool
    ) -> "LocalSandbox":
        if task.docker_only:
            raise TaskError(task.docker_only)
        if task.network:
            raise TaskError(
                f"{task.folder / 'task.toml'}: environment.network_mode: the local backend has no network; use docker"
            )
        message = {
            "agent": agent,
            "workdir": task.workdir,
            "arguments": arguments,
            "environment": variables,
            "disk_mb": DISK_MB,
            "limits": {
                "RLIMIT_NPROC": AGENT_PROCESSES,
                "RLIMIT_AS": task.memory_mb << 20,
                "RLIMIT_CPU": int(task.agent_timeout if agent else task.verifier_timeout) + 1,
                "RLIMIT_CORE": 0,
                "RLIMIT_NOFILE": 1024,
            },
        }
        with self._starts:
            ours, theirs = socket.socketpair()
            try:
                with theirs, self._lock:
                    if self._spawner.poll() is not None:
                        raise SandboxError("the local backend is closed")
                    socket.send_fds(self._control, [b"start"], [theirs.fileno()])
                return LocalSandbox(ours, message, [File(task.workdir, None, 0o755), *files])
            except OSError as error:
                ours.close()
                raise SandboxError(f"a local sandbox could not be started ({error})") from None
            except BaseException:
                ours.close()
                raise

    def close(self) -> None:
        self._control.close()
        self._spawner.kill()
        self._spawner.wait()


class LocalSandbox(shell.Machine):
    """One sandbox; its process 1 answers over `caller`. Used by one thread at a time."""

    def __init__(self, caller: socket.socket, message: dict[str, Any], files: Iterable[File]):
        self.shell: shell.Shell | None = None
        self._caller = caller
        self._exit: int | None = None
        self._descriptors: list[int] = []
        self._terminals: list[pty.Screen] = []
        caller.settimeout(_ANSWER_SECONDS)
        self._send(message, files)
        self._receive(descriptors=True)
        self._root, self._process, self._in, self._out = self._descriptors
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(caller, select.POLLIN)

    def put(self, file: File) -> None:
        self._require_open()
        self._send({"op": "files"}, [file])
        self._confirm()

    def freeze(self) -> None:
        """Stop every process of the agent; returns when all of them are stopped."""
        if self.script(shell.FREEZE):
            raise SandboxError("the sandbox's processes could not be frozen")

    def thaw(self) -> None:
        self.script(shell.THAW)

    def stop(self) -> None:
        """Kill every process; returns when the kernel says that the last one is gone."""
        self._require_open()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        gone = select.poll()
        gone.register(self._process, select.POLLIN)
        if not gone.poll(_ANSWER_SECONDS * 1000):
            raise SandboxError("the sandbox's processes could not be stopped")

    def take(self, paths: Sequence[str]) -> list[File]:
        self._require_open()
        return artifacts.take(self._root, paths)

    def contents(self) -> Iterator[tuple[str, int, bytes]]:
        self._require_open()
        return artifacts.contents(self._root)

    def snapshot(self, task: Task) -> Snapshot:
        raise AssertionError("a task that is verified in a snapshot is refused by `start`")

    def terminal(self, rows: int = 40, columns: int = 160) -> pty.Screen:
        master, slave = os.openpty()
        try:
            termios.tcsetwinsize(slave, (rows, columns))
            self._require_open()
            self._send({"op": "terminal", "arguments": ["/bin/bash", "-l"]})
            socket.send_fds(self._caller, [b"\0"], [slave])
            self._confirm()
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        screen = pty.Screen(io.FileIO(master, "rb"))
        self._terminals.append(screen)
        return screen

    def exhausted(self, suspected: set[str]) -> tuple[str, ...]:
        """Memory and processes have limits a process here, which leave no trace: they are believed."""
        self._require_open()
        room = os.fstatvfs(self._root)
        full = room.f_bavail * room.f_frsize < 1 << 20 or room.f_favail < 16
        return tuple(sorted(suspected if full else suspected - {"disk"}))

    def close(self) -> None:
        for screen in self._terminals:
            screen.close()
        if self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = []
        self._caller.close()

    def wait(self, timeout: float) -> str:
        """The output of the sandbox's one process (a verifier's) once it has ended."""
        collected = shell.Output()
        deadline = time.monotonic() + timeout
        events = select.poll()
        events.register(self._out, select.POLLIN)
        events.register(self._process, select.POLLIN)
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise SandboxError(f"the tests did not end within {timeout:g} s; they wrote: {collected.text()[0]!r}")
            ready = dict(events.poll(remaining * 1000))
            if self._out in ready:
                data = self._read_output()
                collected.feed(data)
                if not data:
                    events.unregister(self._out)
            elif self._process in ready:
                return collected.text()[0]

    def fetch(self, path: str, limit: int) -> bytes | None:
        self._require_open()
        return artifacts.fetch(self._root, path, limit)

    def send(self, data: bytes, deadline: float) -> None:
        self._require_open()
        shell.write_all(self._in, data, deadline, witness=self._caller.fileno())

    def receive(self, seconds: float) -> bytes:
        self._require_open()
        events = dict(self._poll.poll(max(0.0, seconds) * 1000))
        if self._out in events and (data := self._read_output()):
            return data
        if self._caller.fileno() in events:
            self._receive()
        elif self._out in events:
            self._poll.unregister(self._out)  # every writer is gone; only process 1 can say more
        return b""

    def _read_output(self) -> bytes:
        try:
            return os.read(self._out, 1 << 16)
        except BlockingIOError:
            return b""

    def _require_open(self) -> None:
        if not self._descriptors:
            raise SandboxError("the sandbox is closed")

    def script(self, text: str, *arguments: str) -> int:
        self._require_open()
        self._exit = None
        self._send({"op": "run", "arguments": ["/bin/bash", "--noprofile", "--norc", "-c", text, "bash", *arguments]})
        while self._exit is None:
            self._receive()
        return self._exit

    def _confirm(self) -> None:
        while not self._receive().get("ok"):
            pass

    def _send(self, message: dict[str, Any], files: Iterable[File] = ()) -> None:
        listing, parts = [], []
        for file in files:
            listing.append([file.path, -1 if file.data is None else len(file.data), file.mode, file.mtime])
            parts.append(file.data or b"")
        body, blob = json.dumps(message | {"files": listing}).encode(), b"".join(parts)
        try:
            self._caller.sendall(struct.pack(">II", len(body), len(blob)) + body + blob)
        except OSError as error:
            raise SandboxError(f"the sandbox is dead ({error})") from None

    def _receive(self, descriptors: bool = False) -> dict[str, Any]:
        try:
            if descriptors:
                header, self._descriptors, _, _ = socket.recv_fds(self._caller, 4, 4, socket.MSG_CMSG_CLOEXEC)
            else:
                header = self._caller.recv(4)
            size = struct.unpack(">I", header)[0] if len(header) == 4 else 0
            body = b""
            while len(body) < size and (part := self._caller.recv(size - len(body))):
                body += part
        except OSError as error:
            raise SandboxError(f"the sandbox does not answer ({error})") from None
        if not size or len(body) < size:
            raise SandboxError("the sandbox is dead")
        message: dict[str, Any] = json.loads(body)
        if "error" in message:
            raise SandboxError(f"the sandbox failed: {message['error']}")
        if "exit" in message:
            self._exit = message["exit"]
        return message
