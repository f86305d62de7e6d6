"""The docker backend: one container a sandbox."""

import contextlib
import os
import re
import secrets
import shlex
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.types import LogConfig, Ulimit

from . import artifacts, shell, toolchain
from .archive import pack
from .container import API_SECONDS, FAILURES, OUTER, DockerSandbox
from .image import build_image, find_base, make_base
from .interface import Backend
from .records import AGENT_PROCESSES, REPORT_BYTES, RESULT_FILES, File, Grade, SandboxError, Snapshot
from .task import Task

HOME = "/root"
_LABEL = "rsi.owner"
_FILE_BYTES = 1 << 30


def make_images(toolchain_too: bool) -> None:
    """Make the base image, and the offline pytest's where asked for; prints how each came about."""
    try:
        client = docker.from_env(timeout=600)
        print(make_base(client))
        if toolchain_too:
            print(toolchain.make_toolchain(client))
    except docker.errors.DockerException as error:
        raise SandboxError(f"no Docker daemon answers ({str(error).splitlines()[0]}): start one") from None


class DockerBackend(Backend):
    """Starts containers; at most `starts` are being created at once (a two-core daemon starts 5 to 7 a second)."""

    kind = "docker"

    def __init__(self, reason: str, run: str, starts: int, reap: bool = True):
        self.reason = reason
        self.run = re.sub(r"[^A-Za-z0-9_.-]", "-", run).strip("-.") or "run"
        self.starts = threading.BoundedSemaphore(starts)
        self.execs = threading.BoundedSemaphore(2 * starts)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._live: set[str] = set()  # names of our containers
        self.labels = {_LABEL: _owner(os.getpid()), "rsi.run": self.run}
        self._build_lock = threading.Lock()
        self._images: dict[tuple[str, Path | None, str], tuple[str, dict[str, str], str]] = {}
        try:
            self.client.ping()
            if reap:
                self.reap()
        except FAILURES as error:
            raise SandboxError(f"no Docker daemon answers ({error}): start one or use --sandbox local") from None

    @property
    def client(self) -> Any:
        """This thread's connection to the daemon."""
        if not hasattr(self._local, "client"):
            self._local.client = docker.from_env(timeout=API_SECONDS)
        return self._local.client

    def start(self, task: Task) -> "DockerSandbox":
        image, given, user = self._image(task)
        user = task.agent_user or user
        home = HOME if user.partition(":")[0] in ("", "root", "0") else ""  # else docker looks it up
        variables = shell.environment(given | dict(task.variables), home)
        command = [*shell.SHELL, OUTER, "bash", shell.driver(task.workdir, variables)]
        files = () if task.docker_only else task.environment
        sandbox = self._create(task, image, command, variables, files, user=user)
        shell.begin(sandbox, task.healthcheck)
        return sandbox

    def grade(self, task: Task, left: Sequence[File], snapshot: Snapshot | None = None) -> Grade:
        image, given, _ = self._image(task, own=True)
        variables = shell.environment(given | dict(task.variables) | dict(task.verifier_variables), HOME)
        own = task.verifier_image or task.verifier_folder
        volumes = toolchain.mount(self.client, self.labels) if task.docker_only else {}
        if volumes:
            variables["PATH"] = f"{toolchain.ROOT}/bin:{variables['PATH']}"
        tests = [
            File("/logs/verifier", None, 0o777 if task.verifier_user else 0o755),
            *([] if own else [File("/tests", None, 0o755), *task.tests]),
        ]
        command, files = ["/bin/bash", "/tests/test.sh"], tests
        if snapshot or own or task.docker_only:  # the image itself holds what these replace
            stage = f"/.rsi-{secrets.token_hex(8)}"
            roots = [*(() if snapshot else task.artifacts), "/logs/verifier", *(() if own else ("/tests",))]
            script = (
                f"rm -rf -- {shlex.join(roots)}; [[ -L /logs ]] && rm /logs; cp -a {stage}/. / && rm -rf {stage}; "
                f"cd {shlex.quote(task.workdir)}; exec /bin/bash /tests/test.sh"
            )
            if task.verifier_user:
                user, _, group = task.verifier_user.partition(":")
                # Without a group the user's own, as docker does; of a number that is nobody's, root's.
                group = group or f'"$(id -g {user or 0} 2>/dev/null || echo 0)"'
                drop = f"setpriv --reuid={user or 0} --regid={group} --clear-groups"
                script = script.replace("exec /bin/bash", f"exec {drop} /bin/bash")
            command = ["/bin/bash", "--noprofile", "--norc", "-c", script]
            files = [File(stage + file.path, file.data, file.mode, file.mtime) for file in [*left, *tests]]
            image = snapshot.image if snapshot else image
        else:
            files = [*artifacts.outside(task.environment, task.artifacts), *left, *tests]
        try:
            with self._create(task, image, command, variables, files, volumes=volumes) as sandbox:
                output = sandbox.wait(task.verifier_timeout)
                sandbox.stop()
                logs = sandbox.entries("/logs", REPORT_BYTES, 2, cut=True)
                found = {file.path: file.data for file in logs if file.path in RESULT_FILES}
        finally:
            if snapshot:
                self.forget(snapshot)
        reward, report, rewards = map(found.get, RESULT_FILES)
        return Grade(reward, report, output, rewards)

    def forget(self, snapshot: Snapshot) -> None:
        try:
            self.client.api.remove_image(snapshot.image, force=True)
        except docker.errors.ImageNotFound:
            pass
        except FAILURES as error:
            raise SandboxError(f"the snapshot {snapshot.image} could not be removed ({error})") from None

    def _create(
        self,
        task: Task,
        image: str,
        command: list[str],
        variables: dict[str, str],
        files: Iterable[File],
        user: str = "",
        volumes: dict[str, dict[str, str]] | None = None,
    ) -> "DockerSandbox":
        name = f"rsi-{self.run[:40]}-{secrets.token_hex(6)}"
        sandbox = None
        with self.starts:
            try:
                with self._lock:
                    self._live.add(name)
                api = self.client.api  # whose calls, unlike the client's, make no inspection of their own
                limits = api.create_host_config(
                    binds=volumes,
                    network_mode="bridge" if task.network else "none",
                    mem_limit=task.memory_mb << 20,
                    memswap_limit=task.memory_mb << 20,
                    nano_cpus=int(task.cpus * 1e9) or None,
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
                api.create_container(
                    image,
                    command,
                    name=name,
                    hostname="sandbox",
                    working_dir=task.workdir,
                    entrypoint=[],
                    user=user or "root",
                    environment=variables,
                    stdin_open=True,
                    labels=self.labels,
                    host_config=limits,
                )
                api.put_archive(name, "/", pack(files))
                sandbox = DockerSandbox(self, name, user or "root", variables)
                if self._closed:
                    raise SandboxError("the docker backend is closed")
                api.start(name)
                return sandbox
            except BaseException as error:
                with contextlib.suppress(SandboxError):  # it stays among the live ones, which `close` removes
                    sandbox.close() if sandbox else self.remove(name)
                if isinstance(error, FAILURES):
                    raise SandboxError(f"a container could not be started ({error})") from None
                raise

    def _image(self, task: Task, own: bool = False) -> tuple[str, dict[str, str], str]:
        """(name, environment, user) of the task's image, or of its verifier's where that has one of its `own`.

        Of the plain base, to which the task's files are added here, environment and user are empty.
        """
        folder, name = (task.build_folder if task.docker_only else None), task.image
        if own and (task.verifier_image or task.verifier_folder):
            folder, name = task.verifier_folder, task.verifier_image
        key = name, folder, task.base
        with self._build_lock:
            if key not in self._images:
                if name or not folder:
                    image = find_base(self.client, name or task.base)
                else:
                    image = build_image(self.client, folder, task.build_timeout)
                config = self.client.images.get(image).attrs["Config"] if name or folder else {}
                given = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
                given = {name: value for name, value in given.items() if name.isidentifier()}
                self._images[key] = image, given, config.get("User") or ""
            return self._images[key]

    def all(self) -> list[tuple[str, str, str, str]]:
        """(name, run, process id of the owner, state) of every sandbox and snapshot on this daemon; the state is
        "leftover" where the owning process, on this machine, is dead.
        """
        wanted = {"all": True, "filters": {"label": _LABEL}}
        containers = self.client.containers.list(**wanted, ignore_removed=True)
        found = [(each.name, each.labels, each.status) for each in containers]
        found += [(each.id, each.labels, "snapshot") for each in self.client.images.list(**wanted)]
        rows = []
        for name, labels, state in found:
            state = "leftover" if _is_dead(labels[_LABEL]) else state
            rows.append((name, labels.get("rsi.run", ""), labels[_LABEL].partition(" ")[0], state))
        return rows

    def reap(self) -> dict[str, str]:
        """Remove the leftovers; returns their names, and the run of each."""
        found = {name: run for name, run, _, state in self.all() if state == "leftover"}
        for name in found:
            if name.startswith("sha256:"):
                self.forget(Snapshot(name, ()))
            else:
                self.remove(name)
        return found

    def remove(self, name: str) -> None:
        try:
            self.client.api.remove_container(name, force=True, v=True)
        except docker.errors.NotFound:
            pass
        except FAILURES as error:
            if getattr(error, "status_code", 0) != 409:  # being removed already
                raise SandboxError(f"container {name} could not be removed ({error})") from None
        with self._lock:
            self._live.discard(name)

    def close(self) -> None:
        self._closed = True  # what is being created removes itself
        with self._lock:
            live = list(self._live)
        for name in live:
            self.remove(name)


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _is_dead(owner: str) -> bool:
    """Whether the process that a label names is gone; False where another pid namespace has to say."""
    pid, _, namespace = owner.split(" ")
    return namespace == _namespace() and _owner(int(pid)) != owner


def _owner(pid: int) -> str:
    """Identity of a living process: pid, start time, pid namespace; empty when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return f"{pid} {int(fields[19])} {_namespace()}"
