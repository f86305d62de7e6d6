"""Many attempts at once: the one loop that every harness shares.

An attempt samples its turn in a batch with the others, runs its commands in its sandbox, and comes back with what it
saw; what has ended is judged meanwhile. Whoever is ready samples, while the commands of others run; or, with
`lockstep`, all sample and then all run, so that the order of events, hence every number, depends on seeds alone.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rsi_sandbox import Backend, Sandbox, SandboxError, Task, judge, verify

from rsi.chat import Chat
from rsi.config import Rollout
from rsi.harness import NOT_SOLVED, Action, Harness, Outcome
from rsi.sampler import Sampler, Turn
from rsi.trajectory import Exchange, Trajectory, to_json


@dataclass(frozen=True)
class Job:
    """One attempt to make: a task, the seed of its sampling, and the runbook it may read."""

    task: Task
    seed: int
    runbook: str | None = None


@dataclass
class Engine:
    """What attempts are made with."""

    sampler: Sampler
    chat: Chat
    backend: Backend
    settings: Rollout
    report: Callable[[int, int], None] = lambda done, of: None


@dataclass
class Attempt:
    """One attempt under way; `pending` are the ids the policy has not read yet."""

    job: Job
    slot: int
    sandbox: Future[Sandbox]
    record: Trajectory
    pending: list[int] = field(default_factory=list)
    command_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)


def collect(
    jobs: Sequence[Job], harness: Harness, engine: Engine, path: Path, temperature: float | None = None
) -> list[Trajectory]:
    """Attempt every job; returns the records in the order of `jobs`.

    Each finished attempt is appended to `path` (JSONL), whatever became of it. `temperature` None
    means the configured one, 0 greedy.
    """
    temperature = engine.settings.temperature if temperature is None else temperature
    waiting, attempts = deque(jobs), list[Attempt]()
    active: dict[int, Attempt] = {}  # by slot
    acting: dict[Future[None], Attempt] = {}
    finishing: list[Future[None]] = []
    with sink(path) as write, ThreadPoolExecutor(engine.settings.workers) as pool, threads(engine.settings.threads):
        try:
            while waiting or active:
                while waiting and len(active) < engine.settings.slots:
                    attempt = begin(waiting.popleft(), harness, engine, pool)
                    attempts.append(attempt)
                    active[attempt.slot] = attempt
                for slot in sample(active, engine, temperature):
                    acting[pool.submit(act, active[slot], harness, engine)] = active[slot]
                for attempt in acted(acting, engine):
                    if attempt.pending:
                        engine.sampler.submit(attempt.slot, attempt.pending, engine.settings.max_turn_tokens)
                    else:
                        engine.sampler.close(attempt.slot)
                        del active[attempt.slot]
                        finishing.append(pool.submit(finish, attempt, engine, write))
                engine.report(len(attempts) - len(active), len(jobs))
            for future in finishing:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            for slot in active:
                engine.sampler.close(slot)
            for attempt in attempts:
                if attempt.sandbox.done() and not attempt.sandbox.cancelled() and not attempt.sandbox.exception():
                    attempt.sandbox.result().close()
            raise
    return [attempt.record for attempt in attempts]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads: the other cores judge what has ended."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def sink(path: Path) -> Iterator[Callable[[Trajectory], None]]:
    """A function that appends a record to the JSONL file, a whole line at a time, from any thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def write(record: Trajectory) -> None:
            with lock:
                file.write(to_json(record) + "\n")

        yield write


def begin(job: Job, harness: Harness, engine: Engine, pool: ThreadPoolExecutor) -> Attempt:
    """Start the sandbox in the background and give the prompt to the policy."""
    task = job.task
    record = Trajectory(task.name, task.family, task.suite, harness.name, job.seed, job.runbook, end="")
    prompt = engine.chat.prompt(harness.prompt(task.instruction, job.runbook))
    record.extend(prompt)
    slot = engine.sampler.open(job.seed)
    engine.sampler.submit(slot, prompt, engine.settings.max_turn_tokens)
    return Attempt(job, slot, pool.submit(engine.backend.start, task), record, prompt)


def sample(active: Mapping[int, Attempt], engine: Engine, temperature: float) -> list[int]:
    """Sample until a turn ends, in lock-step until all have; the slots of those that did."""
    turns: dict[int, Turn] = {}
    while engine.sampler.busy and (engine.settings.lockstep or not turns):
        turns |= engine.sampler.advance(engine.chat.stops, temperature)
    for slot, (ids, logprobs) in turns.items():
        record = active[slot].record
        record.extend(ids, turn=record.turns, logprob=logprobs)
        if not ids or ids[-1] not in engine.chat.stops:
            record.end = "length"
    return list(turns)


def acted(acting: dict[Future[None], Attempt], engine: Engine) -> list[Attempt]:
    """Take out the attempts whose commands are through: in lock-step all, else waiting only where none can sample."""
    ready = set(acting)
    if not engine.settings.lockstep:
        ready = wait(acting, timeout=0 if engine.sampler.busy else None, return_when=FIRST_COMPLETED).done
    done = [future for future in acting if future in ready]
    for future in done:
        future.result()
    return [acting.pop(future) for future in done]


def act(attempt: Attempt, harness: Harness, engine: Engine) -> None:
    """Run the turn's commands; leaves the observation in `pending`, or nothing and the end's reason."""
    record, attempt.pending = attempt.record, []
    text = engine.chat.decode(record.said(record.turns))
    if record.end:  # cut by a token limit: nothing of the turn runs
        record.exchanges.append(Exchange((), text))
        return
    action = harness.parse(engine.chat.answer(text))
    record.parse_errors += action.error is not None
    try:
        outcomes = run_commands(attempt, action, harness, engine)
        feedback = False
        observation = harness.observe(action, outcomes) if outcomes or not action.done else ""
        if action.done:
            record.end = "done"
            if record.asks < harness.asks:
                record.asks += 1
                if not judge(engine.backend, attempt.job.task, attempt.sandbox.result()).strict:
                    record.end, observation, feedback = "", NOT_SOLVED, True
    except SandboxError as problem:
        record.end, record.error = "infra_error", str(problem)
        record.exchanges.append(Exchange(action.commands, ""))
        return
    record.exchanges.append(Exchange(action.commands, observation, feedback))
    if attempt.command_seconds > attempt.job.task.agent_timeout:
        record.end = "agent_timeout"
    elif not record.end and record.turns >= engine.settings.max_turns:
        record.end = "turns"
    if record.end:
        return
    ids = engine.chat.observation(observation)
    if len(record.ids) + len(ids) >= engine.settings.max_length:
        record.end = "length"
        return
    record.extend(ids)
    attempt.pending = ids


def run_commands(attempt: Attempt, action: Action, harness: Harness, engine: Engine) -> list[Outcome]:
    """The commands' outcomes, in order; stops at the agent's time limit."""
    outcomes = []
    task, sandbox = attempt.job.task, attempt.sandbox.result()
    for command in action.commands:
        left = task.agent_timeout - attempt.command_seconds
        if left <= 0:
            break
        begun = time.monotonic()
        result = sandbox.run(command, min(engine.settings.command_timeout, left), harness.fresh_shell)
        attempt.command_seconds += time.monotonic() - begun
        outcomes.append(Outcome(result.output, result.exit_code, result.limit))
    return outcomes


def finish(attempt: Attempt, engine: Engine, write: Callable[[Trajectory], None]) -> None:
    """Verify in the protected order and write the record, whatever happened."""
    record = attempt.record
    try:
        if record.end != "infra_error":
            verdict = verify(engine.backend, attempt.job.task, attempt.sandbox.result())
            record.checks, record.strict, record.reward = dict(verdict.checks), verdict.strict, verdict.reward
    except SandboxError as problem:
        record.end, record.error = "infra_error", str(problem)
    finally:
        with contextlib.suppress(SandboxError):
            attempt.sandbox.result().close()
        record.seconds = time.monotonic() - attempt.started
        write(record)
