"""The protected verifier: what an agent left behind is judged where it never was.

Order: the agent's sandbox is stopped and confirmed stopped; the declared artifacts are taken, bounded, as
regular files and directories; a fresh sandbox from the clean task environment receives them and only then
the tests; these run as root; their reward is read as a small regular file of that sandbox.
"""

import json
import math
import time

from .interface import Backend, Sandbox
from .records import REPORT_BYTES, Grade, SandboxError, Verdict
from .task import Task


def verify(backend: Backend, task: Task, sandbox: Sandbox) -> Verdict:
    """Judge an ended attempt. Consumes `sandbox`; raises SandboxError where the tests could not run."""
    begun = time.monotonic()
    try:
        sandbox.stop()
        artifacts = sandbox.take(task.artifacts)
    finally:
        sandbox.close()
    return _verdict(backend.grade(task, artifacts), begun)


def judge(backend: Backend, task: Task, sandbox: Sandbox) -> Verdict:
    """Judge an attempt that goes on: frozen and confirmed frozen, graded elsewhere, thawed."""
    begun = time.monotonic()
    sandbox.freeze()
    try:
        artifacts = sandbox.take(task.artifacts)
        return _verdict(backend.grade(task, artifacts), begun)
    finally:
        sandbox.thaw()


def _verdict(grade: Grade, begun: float) -> Verdict:
    reward = _reward(grade)
    checks = _checks(grade)
    return Verdict(reward, checks, reward >= 1 and all(checks.values()), time.monotonic() - begun)


def _reward(grade: Grade) -> float:
    if grade.reward is None:
        raise SandboxError(f"the tests wrote no regular file reward.txt; they said: {grade.output[-2000:]!r}")
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
            checks[name] = checks.get(name, True) and test["status"] == "passed"
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"the tests' ctrf.json is not a CTRF report ({error!r})") from None
    return checks
