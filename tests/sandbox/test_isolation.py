"""What an agent cannot reach, harm or outlive."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import docker
import pytest
from rsi_sandbox import Sandbox, SandboxError, Task, load_task, open_backend
from sandbox_tasks import open_or_skip, write_task

PROJECT = Path(__file__).parents[2]


def test_no_network(sandbox: Sandbox) -> None:
    result = sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1; (echo > /dev/tcp/1.1.1.1/80) 2>&1 | tail -1")
    assert result.output.split()[0] == "lo" and "nreachable" in result.output


def test_host_is_invisible(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in {PROJECT, Path.home() / ".ssh", Path(sys.prefix), tmp_path}:
        assert sandbox.run(f"ls '{path}'").exit_code != 0, path
    assert sandbox.run("ls -A /home /root /tmp /opt /srv /mnt").output.count(".") <= 3
    listing = sandbox.run("cat /proc/self/mountinfo /proc/1/cmdline | tr '\\0' ' '").output
    assert str(PROJECT) not in listing and str(tmp_path) not in listing and sys.prefix not in listing
    assert sandbox.run("ls /tests /solution /logs/verifier").exit_code != 0


def test_processes_of_the_host_are_invisible(sandbox: Sandbox) -> None:
    assert int(sandbox.run("ls -d /proc/[0-9]* | wc -l").output) < 8


def test_local_agent_has_no_privileges(task: Task) -> None:
    with open_backend("local", "tests") as backend, backend.start(task) as sandbox:
        status = sandbox.run("id -u; grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status | tr -d '\\n\\t'")
        assert status.output == "1000\nCapPrm:0000000000000000CapEff:0000000000000000NoNewPrivs:1"
        for path in ("/usr/x", "/etc/passwd", "/bin/x", "/dev/x", "/lib/x", "/proc/sys/kernel/hostname"):
            assert sandbox.run(f"echo x > {path}").exit_code != 0, path
        for command in (
            "mount -t tmpfs x /mnt",
            "unshare -Ur true",
            "unshare -m true",
            "chroot / true",
            "mknod /tmp/d b 8 0",
            "cat /proc/1/environ",
            "ls /proc/1/root",
            "ls /proc/1/fd",
            "hostname x",
            "kill -9 1; sleep 0.1; ! kill -0 1",
        ):
            assert sandbox.run(command).exit_code != 0, command


def test_fork_bomb_is_harmless(sandbox: Sandbox) -> None:
    sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 100", timeout=2)
    deadline = time.monotonic() + 60
    while sandbox.run("echo ok").output != "ok\n":
        assert time.monotonic() < deadline
    assert int(sandbox.run("set -- /proc/[0-9]*; echo $#").output) < 140


def test_process_limit(sandbox: Sandbox) -> None:
    tried = sandbox.run("for i in {1..400}; do sleep 500 >/dev/null & (( ++begun )); done", timeout=10)
    assert tried.exhausted == ("processes",)
    assert int(sandbox.run("set -- /proc/[0-9]*; echo $#").output) < 140


def test_local_disk_and_memory_are_bounded(task: Task) -> None:
    with open_backend("local", "tests") as backend, backend.start(task) as sandbox:
        assert sandbox.run("head -c 300M /dev/zero > big").exit_code != 0
        assert sandbox.run("rm big; echo x > y && cat y").output == "x\n"
        assert (
            sandbox.run("i=0; while ((i++ < 50000)); do : > $i || break; done; rm -f [0-9]*", 60).output.count(
                "No space"
            )
            == 1
        )
        assert sandbox.run("awk 'BEGIN { s = \"x\"; while (1) s = s s }'", 30).exit_code not in (0, None)


def _owner_program(kind: str, folder: Path) -> str:
    return (
        "import sys, time\nfrom pathlib import Path\nfrom rsi_sandbox import load_task, open_backend\n"
        f"backend = open_backend({kind!r}, 'orphan')\nsandbox = backend.start(load_task(Path({str(folder)!r})))\n"
        "sandbox.run('setsid sleep 98765 & sleep 0.1')\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )


@pytest.mark.parametrize("kind", ["local", pytest.param("docker", marks=pytest.mark.docker)])
def test_leftovers_of_a_killed_owner_are_removed(kind: str, tmp_path: Path) -> None:
    open_or_skip(kind).close()
    folder = write_task(tmp_path / "task")
    owner = subprocess.Popen([sys.executable, "-c", _owner_program(kind, folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout and owner.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not _sleepers():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with open_backend(kind, "next"):  # type: ignore[arg-type]
        if kind == "docker":
            assert not docker.from_env().containers.list(all=True, filters={"label": "rsi.run=orphan"})
        deadline = time.monotonic() + 60
        while _sleepers():
            assert time.monotonic() < deadline, "processes of the dead owner are alive"
            time.sleep(0.05)


def _sleepers() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += b"98765" in path.read_bytes() and b"sleep\0" in path.read_bytes()
        except OSError:
            continue
    return found


@pytest.mark.docker
def test_dead_container_is_an_error(tmp_path: Path) -> None:
    with open_or_skip("docker") as backend, backend.start(load_task(write_task(tmp_path))) as sandbox:
        docker.from_env().containers.get(sandbox._name).kill()  # type: ignore[union-attr]
        docker.from_env().containers.get(sandbox._name).wait()  # type: ignore[union-attr]
        with pytest.raises(SandboxError):
            sandbox.run("echo alive", timeout=20)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'dokcer' is unknown"):
        open_backend("dokcer", "tests")  # type: ignore[arg-type]


def test_kernel_without_user_namespaces_gets_one_clear_line() -> None:
    program = (
        "from pathlib import Path\nfrom rsi_sandbox import SandboxError, open_backend\n"
        "Path('/proc/sys/user/max_user_namespaces').write_text('0')\n"
        "try:\n    open_backend('local', 'tests')\nexcept SandboxError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1 and "user namespaces" in done.stdout and "docker" in done.stdout, done


def test_ordinary_user_can_use_the_local_backend() -> None:
    if os.getuid() != 0:
        pytest.skip("the whole suite runs as an ordinary user already")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = (
            "import sys\nfrom pathlib import Path\nfrom rsi_sandbox import load_task, open_backend, verify\n"
            f"task = load_task(Path({str(write_task(Path(folder) / 'task'))!r}))\n"
            "with open_backend('local', 'user') as backend:\n"
            "    sandbox = backend.start(task)\n    sandbox.run('sort words.txt > out.txt')\n"
            "    print(verify(backend, task, sandbox).strict)\n"
        )
        user = [
            "env",
            f"PYTHONPATH={PROJECT / 'sandbox'}",
            "setpriv",
            "--reuid=12345",
            "--regid=12345",
            "--clear-groups",
        ]
        again = "import subprocess, sys, rsi_sandbox; sys.exit(subprocess.run([sys.executable, '-c', '']).returncode)"
        for interpreter in (sys.executable, "/usr/bin/python3"):
            if not subprocess.run([*user, interpreter, "-c", again], capture_output=True, cwd="/").returncode:
                break
        else:
            pytest.skip("another user may read neither this interpreter nor /usr/bin/python3")
        done = subprocess.run([*user, interpreter, "-c", program], capture_output=True, text=True, cwd="/")
    assert done.stdout == "True\n", done.stderr
