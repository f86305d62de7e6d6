"""The protected verifier: honest work passes, nothing else does, and a broken verifier is never a 0."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rsi_sandbox import Backend, SandboxError, Task, judge, load_task, open_backend, verify
from sandbox_tasks import SOLUTION, TEST_SH, write_task


def test_solution_passes_and_nothing_fails(backend: Backend, task: Task) -> None:
    sandbox = backend.start(task)
    assert sandbox.run(SOLUTION).exit_code == 0
    verdict = verify(backend, task, sandbox)
    assert (verdict.reward, verdict.checks, verdict.strict) == (1.0, {"content": True, "kept": True}, True)
    with pytest.raises(SandboxError):
        sandbox.run("echo alive")
    verdict = verify(backend, task, backend.start(task))
    assert (verdict.reward, verdict.checks, verdict.strict) == (0.0, {"content": False, "kept": True}, False)


def test_artifacts_replace_the_working_directory(backend: Backend, task: Task) -> None:
    sandbox = backend.start(task)
    sandbox.run(f"{SOLUTION}; rm words.txt")
    assert verify(backend, task, sandbox).checks["kept"] is False


ATTACKS = {
    "reward written before": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /app/reward.txt",
    "reward daemon": "mkdir -p /logs/verifier /tests; (setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; "
    'echo "echo 1 > /logs/verifier/reward.txt" > /tests/test.sh; done\' >/dev/null 2>&1 &)',
    "planted tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; cp -r /tests /app/",
    "planted configuration": "printf 'import os\\nos._exit(0)\\n' | tee conftest.py sitecustomize.py a.pth >/dev/null; "
    "echo 'sort() { :; }' > ~/.bashrc; export BASH_ENV=~/.bashrc PATH=/app:$PATH",
    "shadowed programs": "printf '#!/bin/bash\\nexit 0\\n' > sort; chmod +x sort; mkdir -p /usr/local/bin; "
    "cp sort /usr/local/bin/ 2>/dev/null; cp sort /usr/bin/sort 2>/dev/null",
    "link to an answer": "ln -s words.txt out.txt",
    "directory replaced by a link": "cd /; mv /app /elsewhere; ln -s /elsewhere /app; "
    "sort /app/words.txt > /app/out.txt",
    "pipe as answer": "mkfifo out.txt",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_score_nothing(backend: Backend, task: Task, attack: str) -> None:
    sandbox = backend.start(task)
    sandbox.run(ATTACKS[attack], timeout=5)
    verdict = verify(backend, task, sandbox)
    assert verdict.reward == 0 and not verdict.strict and not verdict.checks["content"]


def test_only_regular_files_are_taken_and_bounds_hold(backend: Backend, task: Task) -> None:
    with backend.start(task) as sandbox:
        sandbox.run(
            "mkfifo p; ln -s /etc/passwd l; ln -s / root; truncate -s 900M zz-sparse; "
            "mkdir -p a/b; echo x > a/b/f; chmod 4755 a/b/f; "
            "d=.; for i in {1..40}; do d=$d/d; mkdir $d; done; echo y > $d/deep"
        )
        sandbox.stop()
        taken = {file.path: file for file in sandbox.take(("/app", "/missing"))}
    assert {"/app", "/app/a", "/app/a/b", "/app/a/b/f", "/app/words.txt"} <= set(taken)
    assert not {"/app/p", "/app/l", "/app/root", "/app/zz-sparse"} & set(taken)
    assert not any(path.startswith("/app/root/") or path.endswith("deep") for path in taken)
    assert taken["/app/a/b/f"].data == b"x\n" and taken["/app/a/b/f"].mode & 0o7000 == 0


BROKEN = {
    "no reward": "true",
    "syntax error": "if",
    "empty": ": > /logs/verifier/reward.txt",
    "text": "echo good > /logs/verifier/reward.txt",
    "not finite": "echo nan > /logs/verifier/reward.txt",
    "link": "echo 1 > /tmp/r; ln -s /tmp/r /logs/verifier/reward.txt",
    "pipe": "mkfifo /logs/verifier/reward.txt",
    "directory link": "mkdir /tmp/v; echo 1 > /tmp/v/reward.txt; rm -r /logs/verifier; ln -s /tmp/v /logs/verifier",
    "bad report": "echo 1 > /logs/verifier/reward.txt; echo '{' > /logs/verifier/ctrf.json",
    "report of another kind": "echo 1 > /logs/verifier/reward.txt; echo '[1]' > /logs/verifier/ctrf.json",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_verifier_is_an_error(backend: Backend, tmp_path: Path, case: str) -> None:
    task = load_task(write_task(tmp_path / "task", BROKEN[case]))
    with pytest.raises(SandboxError):
        verify(backend, task, backend.start(task))


def test_what_else_the_tests_write_does_not_hide_the_reward(backend: Backend, tmp_path: Path) -> None:
    logs = "/logs/agent/a /logs/verifier/a.log /logs/verifier/z.log"
    script = f"mkdir -p /logs/agent; for f in {logs}; do head -c 3M /dev/zero > $f; done\n{TEST_SH}"
    task = load_task(write_task(tmp_path / "task", script))
    assert verify(backend, task, backend.start(task)).checks == {"content": False, "kept": True}


def test_slow_verifier_is_an_error(backend: Backend, tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[verifier]\ntimeout_sec = 1\n'
    task = load_task(write_task(tmp_path / "task", "sleep 100", **{"task.toml": toml}))
    with pytest.raises(SandboxError, match="1 s"):
        verify(backend, task, backend.start(task))


def test_verifier_runs_as_root_in_a_clean_environment(backend: Backend, tmp_path: Path) -> None:
    test = (
        "[[ $(id -u) == 0 && $PWD == /app && -z $PLANTED && $COLOUR == red && ! -e /tmp/left ]] && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n"
    )
    task = load_task(write_task(tmp_path / "task", test))
    sandbox = backend.start(task)
    sandbox.run("export PLANTED=1; touch /tmp/left")
    assert verify(backend, task, sandbox).strict


def test_judge_freezes_and_thaws(backend: Backend, task: Task) -> None:
    with backend.start(task) as sandbox:
        sandbox.run("KEPT=yes; cd /tmp; (while :; do date +%N > /app/beat; sleep 0.01; done) >/dev/null 2>&1 &")
        assert not judge(backend, task, sandbox).strict
        assert sandbox.run("echo $KEPT $PWD").output == "yes /tmp\n"
        before = sandbox.run("cat /app/beat").output
        sandbox.run(f"cd /app; {SOLUTION}")
        assert (
            sandbox.run(f"until b=$(<beat); [[ $b && $b != {before.strip()!r} ]]; do sleep 0.05; done").exit_code == 0
        )
        assert judge(backend, task, sandbox).strict
        sandbox.freeze()
        frozen = [file.data for file in sandbox.take(("/app/beat",))]
        time.sleep(0.2)  # in which the loop, if it went on, would write again
        assert frozen == [file.data for file in sandbox.take(("/app/beat",))]
        sandbox.thaw()
        assert verify(backend, task, sandbox).strict


def test_failed_check_denies_strict(backend: Backend, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "task", TEST_SH + "echo 1 > /logs/verifier/reward.txt\n"))
    verdict = verify(backend, task, backend.start(task))
    assert verdict.reward == 1.0 and not verdict.strict


def test_no_script_of_the_sandbox_is_waited_for_in_vain(tmp_path: Path) -> None:
    """A child that ends just as process 1 begins to listen must not be missed."""
    task = load_task(write_task(tmp_path / "task"))
    with open_backend("local", "tests") as backend, ThreadPoolExecutor(4) as pool:

        def cycle(_: int) -> float:
            longest = 0.0
            with backend.start(task) as sandbox:
                for _ in range(250):
                    begun = time.monotonic()
                    sandbox.freeze()
                    sandbox.thaw()
                    longest = max(longest, time.monotonic() - begun)
                assert sandbox.run("echo alive").output == "alive\n"
            return longest

        assert max(pool.map(cycle, range(4))) < 55  # one missed end would cost 60 s
