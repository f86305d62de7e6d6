"""What breaks from the outside: killed owners, dead containers, a restarted daemon, many sandboxes at once.

`RSI_KILLS=100 pytest tests/sandbox/test_faults.py -k killed_again` is the long version of the first test.
"""

import os
import random
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from rsi_sandbox import Backend, SandboxError, Task, load_task, open_backend, verify
from rsi_sandbox.__main__ import main
from sandbox_tasks import SOLUTION, open_or_skip, write_task

KINDS = ["local", pytest.param("docker", marks=pytest.mark.docker)]
KILLS = int(os.environ.get("RSI_KILLS", "4"))

# Four threads that start, act and verify without end; `marker` is the argument of a sleep in every sandbox.
OWNER = """
import sys, threading
from pathlib import Path
from rsi_sandbox import load_task, open_backend, verify
kind, run, folder, marker = sys.argv[1:]
task = load_task(Path(folder))
backend = open_backend(kind, run, starts=4)
def work():
    while True:
        sandbox = backend.start(task)
        sandbox.run(f"setsid sleep {marker} & sort words.txt > out.txt")
        print("ready", flush=True)
        assert verify(backend, task, sandbox).strict
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
"""


def processes(marker: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == f"sleep\0{marker}\0".encode()
        except OSError:
            continue
    return found


def mounts() -> int:
    """Mounts of the host that are not some container's."""
    return sum("/docker" not in line for line in Path("/proc/self/mounts").read_text().splitlines())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(60 + 40 * KILLS)
def test_an_owner_killed_again_and_again_leaves_nothing(kind: str, tmp_path: Path) -> None:
    open_or_skip(kind).close()
    folder = write_task(tmp_path / "task", **{"environment/files/words.txt": "b\na\n"})
    rng, run, marker = random.Random(0), f"killed-{secrets.token_hex(4)}", str(secrets.randbelow(10**9) + 10**6)
    before = mounts()
    for _ in range(KILLS):
        program = [sys.executable, "-c", OWNER, kind, run, str(folder), marker]
        owner = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        assert owner.stdout and owner.stdout.readline().startswith("ready")
        threading.Thread(target=owner.stdout.read, daemon=True).start()
        time.sleep(rng.random() * (3 if kind == "docker" else 1))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        if kind == "docker":
            # What the dead owner asked for last may still be on its way in the daemon.
            deadline = time.monotonic() + 120
            while left(run):
                assert main(["reap"]) == 0 and time.monotonic() < deadline, left(run)
        deadline = time.monotonic() + 60
        while processes(marker):
            assert time.monotonic() < deadline, "processes of the dead owner are alive"
            time.sleep(0.05)
    assert mounts() <= before


def left(run: str) -> list[str]:
    client = docker.from_env()
    wanted = {"filters": {"label": f"rsi.run={run}"}}
    containers = client.containers.list(all=True, ignore_removed=True, **wanted)
    return [found.name for found in containers] + [found.id for found in client.images.list(**wanted)]


@pytest.mark.docker
def test_reaping_leaves_the_living_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task(write_task(tmp_path / "task"))
    with open_or_skip("docker") as backend, backend.start(task) as sandbox:
        assert main(["reap"]) == 0 and main(["list"]) == 0
        assert sandbox._name in capsys.readouterr().out  # type: ignore[attr-defined]
        open_backend("docker", "another").close()
        assert sandbox.run("echo alive").output == "alive\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(kind: str, sent: signal.Signals, tmp_path: Path) -> None:
    """Not when its agents' time is up."""
    open_or_skip(kind).close()
    folder, marker = write_task(tmp_path / "task"), str(secrets.randbelow(10**9) + 10**6)
    # What runs these tests may ignore the signal, and with it what they start.
    program = ["env", "--default-signal=INT", sys.executable, "-m", "rsi_sandbox", "run", *[str(folder)] * 3]
    program += ["--sandbox", kind]
    program += ["--agent", f"setsid sleep {marker} & sleep 500", "--out", str(tmp_path / "jobs")]
    owner = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while processes(marker) < 2:
        assert time.monotonic() < deadline and owner.poll() is None
        time.sleep(0.05)
    owner.send_signal(sent)
    _, said = owner.communicate(timeout=100)
    assert (owner.returncode, said) == (130, "rsi_sandbox: interrupted; its sandboxes are removed\n")
    while processes(marker):
        assert time.monotonic() < deadline + 100, "processes of the interrupted run are alive"
        time.sleep(0.05)
    if kind == "docker":
        wanted = {"all": True, "ignore_removed": True, "filters": {"label": "rsi.run=run"}}
        owners = [found.labels["rsi.owner"].split()[0] for found in docker.from_env().containers.list(**wanted)]
        assert str(owner.pid) not in owners


@pytest.mark.docker
def test_no_network_is_made_and_sixteen_are_removed_together(tmp_path: Path) -> None:
    task, networks = load_task(write_task(tmp_path / "task")), {each.id for each in docker.from_env().networks.list()}
    with open_or_skip("docker") as backend:
        with ThreadPoolExecutor(16) as pool:
            assert len({sandbox._name for sandbox in pool.map(backend.start, [task] * 16)}) == 16  # type: ignore[attr-defined]
        assert {each.id for each in docker.from_env().networks.list()} == networks
        begun = time.monotonic()
        backend.close()
        assert time.monotonic() - begun < 60 and not names(backend)
        with pytest.raises(SandboxError, match="is closed"):
            backend.start(task)


@pytest.mark.docker
@pytest.mark.parametrize("when", ["acting", "verifying"])
def test_a_container_killed_from_outside_is_an_infra_error(tmp_path: Path, when: str) -> None:
    task = load_task(write_task(tmp_path / "task", "sleep 300"))
    with open_or_skip("docker") as backend, ThreadPoolExecutor(1) as pool:
        sandbox = backend.start(task)
        killed = {sandbox._name}  # type: ignore[attr-defined]
        if when == "acting":
            done = pool.submit(sandbox.run, "sleep 300", 200)
        else:
            done, agents = pool.submit(verify, backend, task, sandbox), killed
            while not (killed := names(backend) - agents):
                assert not done.done()
                time.sleep(0.02)
        for name in killed:
            while not done.done():
                try:
                    docker.from_env().containers.get(name).kill()
                    break
                except docker.errors.APIError:  # it does not run yet
                    time.sleep(0.05)
        with pytest.raises(SandboxError):
            done.result(timeout=100)
        sandbox.close()
        assert not names(backend)


def names(backend: Backend) -> set[str]:
    return set(backend._live)  # type: ignore[attr-defined]


def test_a_killed_helper_or_first_process_is_an_infra_error(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "task"))
    with open_backend("local", "tests") as backend:
        sandbox = backend.start(task)
        first = sandbox._process  # type: ignore[attr-defined]
        signal.pidfd_send_signal(first, signal.SIGKILL)
        assert select.select([first], [], [], 60)[0]  # until it has died, its shell may still answer
        with pytest.raises(SandboxError):
            sandbox.run("echo alive")
        sandbox.close()
        sandbox = backend.start(task)
        backend._spawner.kill()  # type: ignore[attr-defined]
        backend._spawner.wait()  # type: ignore[attr-defined]
        with pytest.raises(SandboxError):
            sandbox.run("sleep 60", timeout=20)
        with pytest.raises(SandboxError):
            backend.start(task)


@pytest.mark.parametrize("kind", KINDS)
def test_sixty_four_at_once(kind: str, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "task"))
    together = threading.Barrier(64)

    def attempt(number: int) -> bool:
        with backend.start(task) as sandbox:
            together.wait(timeout=240)  # all 64 are alive at this moment
            sandbox.run(SOLUTION if number % 2 else "true", timeout=60)
            return verify(backend, task, sandbox).strict

    open_or_skip(kind).close()
    with open_backend(kind, "many", starts=4) as backend, ThreadPoolExecutor(64) as threads:  # type: ignore[arg-type]
        assert list(threads.map(attempt, range(64))) == [bool(number % 2) for number in range(64)]


@pytest.fixture
def own_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A daemon of this test alone, with the base image, at DOCKER_HOST; a list, so that it can be restarted."""
    if os.getuid() or not shutil.which("dockerd"):
        pytest.skip("needs root and dockerd")
    open_or_skip("docker").close()
    with tempfile.TemporaryDirectory(prefix="rsi-daemon-") as folder:
        image = Path(folder) / "base.tar"
        with image.open("wb") as file:
            for chunk in docker.from_env(timeout=300).images.get("rsi-base:bookworm").save(named=True):
                file.write(chunk)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/d.sock")
        running = [start_daemon(folder)]
        docker.from_env(timeout=300).images.load(image.read_bytes())
        yield running
        running[-1].terminate()
        running[-1].wait(timeout=60)


def start_daemon(folder: str) -> "subprocess.Popen[bytes]":
    # In a network namespace of its own: without a bridge a daemon removes the one that the machine's daemon uses.
    daemon = subprocess.Popen(
        ["unshare", "--net", "dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
         "--pidfile", f"{folder}/pid", "--host", f"unix://{folder}/d.sock", "--bridge", "none", "--iptables=false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        try:
            docker.DockerClient(f"unix://{folder}/d.sock").ping()
            return daemon
        except docker.errors.DockerException:
            assert time.monotonic() < deadline and daemon.poll() is None
            time.sleep(0.2)


@pytest.mark.docker
def test_a_restarted_daemon(own_daemon: list["subprocess.Popen[bytes]"], tmp_path: Path) -> None:
    """What runs while the daemon goes ends as an error in time; after it is back all is as ever."""
    task: Task = load_task(write_task(tmp_path / "task"))
    with open_backend("docker", "restart") as backend:
        sandbox = backend.start(task)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(sandbox.run, "sleep 50", 60)
            time.sleep(0.5)
            own_daemon[-1].terminate()
            own_daemon[-1].wait(timeout=60)
            with pytest.raises(SandboxError):
                running.result(timeout=30)
        with pytest.raises(SandboxError):
            backend.start(task)
        own_daemon.append(start_daemon(os.environ["DOCKER_HOST"].removeprefix("unix://").removesuffix("/d.sock")))
        sandbox.close()
        sandbox = backend.start(task)
        sandbox.run(SOLUTION)
        assert verify(backend, task, sandbox).strict
    assert not docker.from_env().containers.list(all=True)
