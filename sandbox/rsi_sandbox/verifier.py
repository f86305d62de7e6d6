"""The protected verifier: what an agent left behind is judged where it never was.

Order: the agent's sandbox is stopped and confirmed stopped; the declared artifacts are taken, bounded, as
regular files and directories; a fresh sandbox from the clean task environment receives them and only then
the tests; these run as root; their reward is read as a small regular file of that sandbox.

A task that asks for a snapshot is judged in a fresh container made of the stopped one's files, after a look at what
the agent changed: where that could change the judge, the verdict is "tampered" and no test runs.
"""

import fnmatch
import json
import math
import re
import time

from .interface import Backend, Sandbox
from .records import REPORT_BYTES, Grade, SandboxError, Verdict
from .task import Task

# What a shell says of a program that the tests fetch: then the tests never ran, and a 0 is not the agent's.
_BOOTSTRAP = re.compile(r"^/tests/\S+: line \d+: (uvx?|pytest|pip3?|python3?|curl): command not found$", re.MULTILINE)


def verify(backend: Backend, task: Task, sandbox: Sandbox) -> Verdict:
    """Judge an ended attempt. Consumes `sandbox`; raises SandboxError where the tests could not run."""
    begun = time.monotonic()
    try:
        sandbox.stop()
        return _grade(backend, task, sandbox, begun, ended=True)
    finally:
        sandbox.close()


def judge(backend: Backend, task: Task, sandbox: Sandbox) -> Verdict:
    """Judge an attempt that goes on: frozen and confirmed frozen, graded elsewhere, thawed."""
    begun = time.monotonic()
    sandbox.freeze()
    try:
        return _grade(backend, task, sandbox, begun, ended=False)
    finally:
        sandbox.thaw()


def _grade(backend: Backend, task: Task, sandbox: Sandbox, begun: float, ended: bool) -> Verdict:
    if task.mode == "snapshot":
        snapshot = sandbox.snapshot(task)
        if ended:
            sandbox.close()
        if snapshot.tampered:
            backend.forget(snapshot)
            return Verdict(0.0, {}, False, time.monotonic() - begun, {"reward": 0.0}, snapshot.tampered)
        return _verdict(backend.grade(task, (), snapshot), begun)
    taken = sandbox.take(task.artifacts)
    if ended:
        sandbox.close()
    left = [file for file in taken if not any(fnmatch.fnmatch(file.path, pattern) for pattern in task.excluded)]
    return _verdict(backend.grade(task, left), begun)


def _verdict(grade: Grade, begun: float) -> Verdict:
    rewards = _rewards(grade)
    checks = _checks(grade)
    reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
    full = all(value >= 1 for value in rewards.values())
    if reward < 1 and grade.report is None and (found := _BOOTSTRAP.search(grade.output)):
        raise SandboxError(f"the tests could not run: {found[0]!r}")
    note = ""
    if checks and full != all(checks.values()):
        failed = sorted(name for name, passed in checks.items() if not passed)
        note = f"reward {reward:g}, but " + (f"{', '.join(failed[:5])} failed" if failed else "every check passed")
    strict = full and all(checks.values())
    return Verdict(reward, checks, strict, time.monotonic() - begun, rewards, (), note, grade.output)


def _rewards(grade: Grade) -> dict[str, float]:
    if grade.rewards is None:
        return {"reward": _reward(grade)}
    try:
        rewards = json.loads(grade.rewards[: REPORT_BYTES - 1])
        values = {str(name): float(value) for name, value in rewards.items() if isinstance(value, int | float)}
    except (ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SandboxError(f"the tests' reward.json is not a flat table of numbers ({error!r})") from None
    if not values or len(values) < len(rewards) or not all(map(math.isfinite, values.values())):
        raise SandboxError(f"the tests' reward.json is not a flat table of finite numbers: {grade.rewards[:200]!r}")
    return values


def _reward(grade: Grade) -> float:
    if grade.reward is None:
        raise SandboxError(
            f"the tests wrote no regular file /logs/verifier/reward.txt; they said: {grade.output[-2000:]!r}"
        )
    try:
        value = float(grade.reward[:64].decode("ascii"))
    except ValueError:
        raise SandboxError(f"the tests wrote {grade.reward[:64]!r} as reward: not a number") from None
    if not math.isfinite(value):
        raise SandboxError(f"the tests wrote {value} as reward: not finite")
    return value


def _checks(grade: Grade) -> dict[str, bool]:
    if grade.report is None:
        return {}
    if len(grade.report) >= REPORT_BYTES:
        raise SandboxError(f"the tests' ctrf.json has {REPORT_BYTES} bytes or more")
    try:
        tests = json.loads(grade.report)["results"]["tests"]
        checks: dict[str, bool] = {}
        for test in tests:
            name = str(test["name"])
            if test["status"] not in ("skipped", "pending"):
                checks[name] = checks.get(name, True) and test["status"] == "passed"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SandboxError(f"the tests' ctrf.json is not a CTRF report ({error!r})") from None
    if not tests:
        raise SandboxError(f"the tests' report names no test; they said: {grade.output[-2000:]!r}")
    return checks
