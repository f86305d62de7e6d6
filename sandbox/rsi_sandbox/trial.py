"""One trial of a task, from start to verdict, and its folder in Harbor's layout."""

import datetime
import hashlib
import json
import math
import re
import secrets
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .interface import Backend, Sandbox
from .leaks import leaks
from .records import File, Result, SandboxError, TaskError, Verdict
from .shell import exports, wait_healthy
from .task import Task
from .verifier import judge, verify


@dataclass
class Trial:
    """A trial under way. `outcome` is "passed", "failed", "tampered", "agent_timeout" (graded all the same),
    "infra_error" or "task_error"; before that, what is being done.
    """

    task: Task
    agent: str
    name: str
    outcome: str = "waiting"
    verdict: Verdict | None = None
    error: str = ""
    commands: list[tuple[str, Result]] = field(default_factory=list)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)  # Unix times by phase
    steps: list[tuple[str, Verdict]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    trace: str = ""

    @property
    def seconds(self) -> float:
        times = [moment for phase in self.phases.values() for moment in phase]
        return max(times) - min(times) if times else 0.0


def new_trial(task: Task, agent: str) -> Trial:
    short = re.sub(r"[^\w.-]+", "-", task.name.rpartition("/")[2])[:32]
    return Trial(task, agent, f"{short}__{secrets.token_hex(4)[:7]}")


def run_trial(backend: Backend, trial: Trial, folder: Path | None = None, search: bool = False) -> Trial:
    """Run a trial to its outcome, never raising for what a task or the machine does wrong; write it to `folder`.

    With `search`, what the agent's system holds of tests and solution is looked for first.
    """
    try:
        with _phase(trial, "environment_setup", "starting"):
            sandbox = backend.start(trial.task)
        with sandbox:
            if search:
                trial.outcome = "searching for leaks"
                trial.leaks = leaks(sandbox, trial.task)
            timed_out = _attempt(backend, trial, sandbox)
        assert trial.verdict
        passed = "tampered" if trial.verdict.tampered else "passed" if trial.verdict.strict else "failed"
        trial.outcome = "agent_timeout" if timed_out and passed == "failed" else passed
    except (SandboxError, TaskError) as error:
        trial.outcome = "task_error" if isinstance(error, TaskError) else "infra_error"
        trial.error, trial.trace = str(error), traceback.format_exc()
    if folder:
        write_trial(trial, folder)
    return trial


def _attempt(backend: Backend, trial: Trial, sandbox: Sandbox) -> bool:
    """Act and verify, step by step; whether the agent ran out of time."""
    task, timed_out = trial.task, False
    steps = task.steps or (task,)
    for step in steps:
        for file in step.workdir_files:
            if file.data is not None:
                sandbox.write(file.path, file.data, file.mode)
        if any(file.path == f"{task.workdir}/setup.sh" for file in step.workdir_files):
            done = sandbox.run("bash setup.sh", step.agent_timeout, fresh=True)
            if done.exit_code != 0:
                raise SandboxError(
                    f"step {step.name}: setup.sh failed: {done.limit or done.exit_code}: {done.output!r}"
                )
        if task.steps:
            wait_healthy(sandbox, step.healthcheck)
        with _phase(trial, "agent_execution", f"agent: {step.name}" if task.steps else "agent"):
            timed_out |= _act(trial, step, sandbox)
        with _phase(trial, "verifier", "verifying"):
            last = step is steps[-1]
            verdict = verify(backend, step, sandbox) if last else judge(backend, step, sandbox)
        trial.steps.append((step.name, verdict))
        if not enough(step, verdict):
            break
    trial.verdict = combine(task, [verdict for _, verdict in trial.steps])
    return timed_out


def _act(trial: Trial, step: Task, sandbox: Sandbox) -> bool:
    if trial.agent == "nop":
        return False
    command = trial.agent
    if trial.agent == "oracle":
        if not step.solution:
            raise TaskError(f"{step.folder / 'solution'}: folder: missing; the oracle needs solution/solve.sh")
        for file in step.solution:
            if file.data is not None:
                sandbox.write(file.path, file.data, file.mode)
        variables = exports(dict(step.solution_variables))
        command = f"env {variables} bash /solution/solve.sh" if variables else "bash /solution/solve.sh"
    result = sandbox.run(command, step.agent_timeout)
    trial.commands.append((command, result))
    return result.limit == "timeout"


def enough(step: Task, verdict: Verdict) -> bool:
    """Whether the steps after this one are to be attempted."""
    if isinstance(step.min_reward, tuple):
        return all(verdict.rewards.get(name, -math.inf) >= float(least) for name, least in step.min_reward)
    return step.min_reward is None or verdict.reward >= step.min_reward


def combine(task: Task, verdicts: list[Verdict]) -> Verdict:
    """The verdict on a task of several steps: each reward's mean over all steps (0 where missing), or the last's."""
    if not task.steps:
        return verdicts[0]
    missing = len(task.steps) - len(verdicts)
    names = {name for verdict in verdicts for name in verdict.rewards}
    rewards = {name: sum(v.rewards.get(name, 0.0) for v in verdicts) / len(task.steps) for name in names}
    if task.final_step_counts:
        rewards = {name: 0.0 for name in names} if missing else verdicts[-1].rewards
    checks = {
        f"{step.name}/{name}": passed
        for step, verdict in zip(task.steps, verdicts, strict=False)
        for name, passed in verdict.checks.items()
    }
    strict = not missing and (verdicts[-1].strict if task.final_step_counts else all(v.strict for v in verdicts))
    tampered = tuple(path for verdict in verdicts for path in verdict.tampered)
    reward = rewards.get("reward", sum(rewards.values()) / max(1, len(rewards)))
    seconds = sum(verdict.seconds for verdict in verdicts)
    return Verdict(reward, checks, strict and not tampered, seconds, rewards, tampered)


@contextmanager
def _phase(trial: Trial, name: str, doing: str) -> Iterator[None]:
    """Notes a phase's beginning and end; where it comes again, the whole span."""
    trial.outcome = doing
    begun = trial.phases.get(name, (time.time(), 0.0))[0]
    trial.phases[name] = (begun, time.time())
    try:
        yield
    finally:
        trial.phases[name] = (begun, time.time())


def write_trial(trial: Trial, folder: Path) -> None:
    """Write `<folder>/<trial>/` as Harbor does: config, result, log, agent/trajectory.json (ATIF), verifier/."""
    texts = {
        "config.json": _json(_config(trial, folder)),
        "result.json": _json(result(trial, folder)),
        "trial.log": "".join(f"{_moment(a)} {_moment(b)} {name}\n" for name, (a, b) in trial.phases.items()),
        "agent/trajectory.json": _json(trajectory(trial)),
    }
    if trial.error:
        texts["exception.txt"] = f"{trial.error}\n\n{trial.trace}"
    if trial.agent == "oracle" and trial.commands:
        texts["agent/oracle.txt"] = "".join(result.output for _, result in trial.commands)
    if verdict := trial.verdict:
        tests = [{"name": n, "status": "passed" if p else "failed", "duration": 0} for n, p in verdict.checks.items()]
        texts["verifier/reward.json"] = _json(verdict.rewards)
        texts["verifier/ctrf.json"] = _json({"results": {"tool": {"name": "rsi_sandbox"}, "tests": tests}})
        texts["verifier/test-stdout.txt"] = verdict.output
    for name, text in texts.items():
        path = folder / trial.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")


def _config(trial: Trial, folder: Path) -> dict[str, Any]:
    return {
        "task": {"path": str(trial.task.folder)},
        "trial_name": trial.name,
        "trials_dir": str(folder),
        "agent": {"name": trial.agent},
    }


def result(trial: Trial, folder: Path) -> dict[str, Any]:
    """Harbor's TrialResult (schema 1); `outcome`, `tampered`, `note` and `leaks` are our own."""
    verdict = trial.verdict
    error = trial.error and {
        "exception_type": "TaskError" if trial.outcome == "task_error" else "SandboxError",
        "exception_message": trial.error,
        "exception_traceback": trial.trace,
        "occurred_at": _moment(time.time()),
    }
    spans = {n: {"started_at": _moment(a), "finished_at": _moment(b)} for n, (a, b) in trial.phases.items()}
    times = [moment for phase in trial.phases.values() for moment in phase] or [time.time()]
    files: tuple[File, ...] = (*trial.task.environment, *trial.task.tests)
    steps = [{"step_name": name, "verifier_result": {"rewards": step.rewards}} for name, step in trial.steps]
    return {
        "schema_version": 1,
        "id": str(uuid.uuid4()),
        "task_name": trial.task.name,
        "trial_name": trial.name,
        "trial_uri": (folder / trial.name).resolve().as_uri(),
        "task_id": {"path": str(trial.task.folder)},
        "source": None,
        "task_checksum": hashlib.sha256(repr((trial.task.instruction, files)).encode()).hexdigest(),
        "config": _config(trial, folder),
        "agent_info": {"name": trial.agent, "version": "1", "model_info": None},
        "agent_result": None,
        "verifier_result": {"rewards": verdict.rewards} if verdict else None,
        "verifier_environment_mode": "shared" if trial.task.mode == "snapshot" else "separate",
        "exception_info": error or None,
        "started_at": _moment(min(times)),
        "finished_at": _moment(max(times)),
        **{name: spans.get(name) for name in ("environment_setup", "agent_setup", "agent_execution", "verifier")},
        "step_results": steps if trial.task.steps else None,
        "reward_valid": verdict is not None,
        "outcome": trial.outcome,
        "tampered": list(verdict.tampered) if verdict else [],
        "note": verdict.note if verdict else "",
        "leaks": trial.leaks,
    }


def trajectory(trial: Trial) -> dict[str, Any]:
    """The trial's commands as an ATIF 1.6 document."""
    first = (trial.task.steps or (trial.task,))[0]
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": first.instruction}]
    for number, (command, outcome) in enumerate(trial.commands, 1):
        name = f"call_{number}_1"
        call = {"tool_call_id": name, "function_name": "bash_command", "arguments": {"command": command}}
        observation = {"results": [{"source_call_id": name, "content": outcome.output}]}
        extra = {"exit_code": outcome.exit_code, "limit": outcome.limit, "exhausted": list(outcome.exhausted)}
        step = {"step_id": number + 1, "source": "agent", "message": "", "tool_calls": [call]}
        steps.append(step | {"observation": observation, "extra": extra})
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": trial.name,
        "agent": {"name": trial.agent, "version": "1"},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
    }


def summary(trials: list[Trial]) -> dict[str, Any]:
    """The job's result.json: counts by outcome and the mean reward of the trials that were judged."""
    rewards = [trial.verdict.reward for trial in trials if trial.verdict]
    outcomes = sorted({trial.outcome for trial in trials})
    return {
        "n_total_trials": len(trials),
        "outcomes": {name: sum(trial.outcome == name for trial in trials) for name in outcomes},
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "trials": {trial.name: trial.outcome for trial in trials},
    }


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
