# ruff: noqa: E501  (tables of scripts, one a line)
"""Whole-system tasks: judged in a snapshot of the agent's container, with a look for tampering first."""

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from rsi_sandbox import Backend, Task, TaskError, judge, load_task, open_backend, verify
from rsi_sandbox.toolchain import IMAGE
from sandbox_tasks import need_toolchain, open_or_skip, write_task

pytestmark = pytest.mark.docker

# pytest by the toolchain; what is judged lies outside of any working directory.
TEST_SH = """#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
OUTPUTS = """import subprocess
from pathlib import Path

def test_configured():
    assert Path("/etc/greeting.conf").read_text() == "hello\\n"

def test_program():
    assert subprocess.run(["bash", "-c", "cat /etc/greeting.conf"], capture_output=True, text=True).stdout == "hello\\n"
"""
SOLUTION = "echo hello > /etc/greeting.conf"


def snapshots(daemon: Backend) -> list[object]:
    """Images that this process has made and not removed."""
    owner = daemon.labels["rsi.owner"]  # type: ignore[attr-defined]
    return docker.from_env().images.list(filters={"label": f"rsi.owner={owner}"})


@pytest.fixture(scope="module")
def daemon() -> Iterator[Backend]:
    with open_or_skip("docker") as backend:
        need_toolchain(IMAGE)
        yield backend


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Task:
    toml = "[verifier]\nenvironment_mode = 'shared'\ntimeout_sec = 60\n"
    folder = tmp_path_factory.mktemp("system") / "task"
    return load_task(write_task(folder, TEST_SH, **{"task.toml": toml, "tests/test_outputs.py": OUTPUTS}))


def test_solution_passes_and_nothing_fails(daemon: Backend, system: Task) -> None:
    sandbox = daemon.start(system)
    sandbox.run(f"{SOLUTION}; mkdir -p /opt/tool /usr/local/bin; echo x > /opt/tool/x; echo x > /usr/local/bin/mytool")
    assert not judge(daemon, system, daemon.start(system)).strict
    verdict = verify(daemon, system, sandbox)
    assert verdict.strict and verdict.checks == {
        "test_outputs.py::test_configured": True,
        "test_outputs.py::test_program": True,
    }
    assert not snapshots(daemon), "snapshots are removed"


def test_local_refuses_a_snapshot(system: Task) -> None:
    with open_backend("local", "tests") as backend, pytest.raises(TaskError, match=r"environment_mode.*use docker"):
        backend.start(system)


EXIT = "import os; os._exit(0)"
TAMPERED = {
    "python replaced": ("echo '#!/bin/true' > /usr/bin/python3; chmod +x /usr/bin/python3", "/usr/bin/python3"),
    "bash replaced": ("cp /bin/true /usr/bin/bash.new; mv /usr/bin/bash.new /usr/bin/bash", "/usr/bin/bash"),
    "bash shadowed": ("cp /bin/true /usr/local/bin/bash", "/usr/local/bin/bash"),
    "a name the tests use": ("cp /bin/true /usr/local/bin/uvx", "/usr/local/bin/uvx"),
    "cat replaced": ("cp /bin/true /bin/cat", "/usr/bin/cat"),
    "curl planted": ("printf '#!/bin/bash\\necho' > /usr/bin/curl; chmod +x /usr/bin/curl", "/usr/bin/curl"),
    "preload": ("echo /tmp/x.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
    "loader's paths": ("mkdir -p /etc/ld.so.conf.d; echo /tmp > /etc/ld.so.conf.d/a.conf", "/etc/ld.so.conf.d/a.conf"),
    "libc replaced": ("cp /lib/x86_64-linux-gnu/libc.so.6 /tmp/l; echo >> /tmp/l; mv /tmp/l /lib/x86_64-linux-gnu/libc.so.6",
                      "/usr/lib/x86_64-linux-gnu/libc.so.6"),
    "pth file": (f"mkdir -p /usr/lib/python3/dist-packages; echo '{EXIT}' > /usr/lib/python3/dist-packages/a.pth",
                 "/usr/lib/python3/dist-packages/a.pth"),
    "sitecustomize": (f"mkdir -p /usr/lib/python3.11; echo '{EXIT}' > /usr/lib/python3.11/sitecustomize.py",
                      "/usr/lib/python3.11/sitecustomize.py"),
    "uv's environment file": ("mkdir -p ~/.local/bin; echo 'exit 0' > ~/.local/bin/env", "/root/.local/bin/env"),
    "program removed": ("rm /usr/bin/rm", "/usr/bin/rm"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_a_verdict_of_its_own(daemon: Backend, system: Task, name: str) -> None:
    script, path = TAMPERED[name]
    sandbox = daemon.start(system)
    sandbox.run(f"{SOLUTION}; {script}")
    verdict = verify(daemon, system, sandbox)
    assert path in verdict.tampered and (verdict.reward, verdict.strict) == (0.0, False)
    assert not snapshots(daemon)


PLANTED = "printf '#!/bin/bash\\nexit 0\\n' > {0}; chmod +x {0}"


@pytest.mark.parametrize(
    ("script", "path"),
    [
        (PLANTED.format("/opt/tool/bin/cat"), "/opt/tool/bin/cat"),
        (PLANTED.format("/opt/tool/bin/mktest"), "/opt/tool/bin/mktest"),
        ("mv /opt/tool /opt/x; mkdir /t; cp -r /opt/x/bin /t; ln -s /t /opt/tool", "/opt/tool"),
        ("echo y > /opt/tool/x; " + PLANTED.format("/opt/tool/bin/other"), ""),
    ],
)
def test_folders_that_the_image_puts_on_path_are_watched(
    daemon: Backend, tmp_path: Path, script: str, path: str
) -> None:
    lines = "FROM debian:bookworm\nRUN mkdir -p /opt/tool/bin\nENV PATH=/opt/tool/bin:$PATH\nWORKDIR /app\n"
    toml = "[verifier]\nenvironment_mode = 'shared'\n"
    test = "cat /etc/hosts; mktest 2>/dev/null; echo 0 > /logs/verifier/reward.txt\n"
    task = load_task(write_task(tmp_path / "t", test, **{"task.toml": toml, "environment/Dockerfile": lines}))
    sandbox = daemon.start(task)
    assert sandbox.run(script).exit_code == 0
    tampered = verify(daemon, task, sandbox).tampered
    assert path in tampered if path else tampered == ()


# Not seen by the tamper check, and harmless all the same.
HARMLESS = {
    "reward written before": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/reward.json",
    "reward daemon": "(setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
    "planted conftest": f"mkdir /tests; for d in / /app /tests /root; do echo '{EXIT}' > $d/conftest.py; "
    "printf '[pytest]\\naddopts=--co\\n' > $d/pytest.ini; done",
    "tests are a link": "mkdir /t; echo 'echo 1 > /logs/verifier/reward.txt' > /t/test.sh; ln -s /t /tests",
    "logs are a link": "mkdir -p /l/verifier; echo 1 > /l/verifier/reward.txt; ln -s /l /logs",
    "verifier's folder is a link": "mkdir -p /logs /l; ln -s /l /logs/verifier; echo 1 > /l/reward.txt",
    "rc files": "for f in ~/.bashrc ~/.profile /etc/profile /etc/bash.bashrc; do echo 'exit 0' > $f; done; "
    "export BASH_ENV=~/.bashrc PYTEST_ADDOPTS=--co PYTHONPATH=/app",
    "toolchain planted": "mkdir -p /opt/rsi/bin; printf '#!/bin/bash\\nexit 0\\n' | tee /opt/rsi/bin/uvx /opt/rsi/bin/pytest; "
    "chmod +x /opt/rsi/bin/*",
    "python modules in the way": f"for d in / /app /root; do echo '{EXIT}' | tee $d/pytest.py $d/pathlib.py $d/subprocess.py; done",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_attacks_on_a_snapshot_score_nothing(daemon: Backend, system: Task, name: str) -> None:
    sandbox = daemon.start(system)
    sandbox.run(HARMLESS[name], timeout=5)
    verdict = verify(daemon, system, sandbox)
    assert (verdict.reward, verdict.strict, verdict.tampered) == (0.0, False, ())
    assert not any(verdict.checks.values()) and len(verdict.checks) == 2


ENDINGS = {
    "ends the process": "import os; os._exit(0)",
    "ends it at exit": "import atexit, os; atexit.register(os._exit, 0)",
    "writes the reward": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "raises SystemExit": "raise SystemExit(0)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_code_under_test_cannot_end_the_tests_well(daemon: Backend, tmp_path: Path, name: str) -> None:
    """In artifacts mode, with tests that import the agent's own module into pytest."""
    outputs = (
        "import sys\nsys.path.insert(0, '/app')\n\ndef test_f():\n    from answer import f\n    assert f(2) == 4\n"
    )
    dockerfile = "FROM debian:bookworm\nWORKDIR /app\nRUN true\n"
    files = {"tests/test_outputs.py": outputs, "environment/Dockerfile": dockerfile}
    task = load_task(write_task(tmp_path / "task", TEST_SH, **files))
    sandbox = daemon.start(task)
    sandbox.write("/app/answer.py", b"def f(x):\n    return x * x\n")
    assert verify(daemon, task, sandbox).strict
    sandbox = daemon.start(task)
    sandbox.write("/app/answer.py", f"{ENDINGS[name]}\ndef f(x):\n    return 0\n".encode())
    verdict = verify(daemon, task, sandbox)
    assert not verdict.strict and not all(verdict.checks.values())
