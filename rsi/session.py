"""What the stages of one run share: tasks, tokenizer, sandboxes, device, log."""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rsi_sandbox import Backend, Task, TaskError, load_task, open_backend

from rsi import distributed
from rsi.chat import Chat
from rsi.checkpoint import Parts, Progress, Run, write_atomically
from rsi.config import SUITES, Config, UserError
from rsi.guards import CannotGoOn, guard
from rsi.harness import Harness
from rsi.metrics import Log
from rsi.model import Transformer, keep_freed_memory
from rsi.rollout import Engine, Job, collect
from rsi.sampler import Sampler
from rsi.tiny import Split, generate, write_task
from rsi.trajectory import Trajectory, read, to_json

Pool = dict[str, list[Task]]  # suite -> tasks
MAX_LOST = 0.25  # share of the attempts for training; with more lost to the machine the rest is no fair sample


class Interrupted(Exception):
    """The user asked the run to stop, and what it did so far is saved."""


@dataclass
class Session:
    """`train` and `evaluation` map a suite to its tasks; `progress` is that of the stage under way.

    `stopping` is set when the user asks for a stop: the step under way is finished and saved.
    """

    run: Run
    log: Log
    backend: Backend
    device: torch.device
    train: Pool
    evaluation: Pool
    progress: Progress = field(init=False)
    stopping: bool = False

    @property
    def config(self) -> Config:
        return self.run.config

    def engine(self, actor: Transformer, chat: Chat, report: Callable[[int, int], None]) -> Engine:
        """Make this rank's share of attempts with `actor` as it is now. All ranks call."""
        slots = self.config.rank_slots(distributed.world())
        settings = dataclasses.replace(self.config.rollout, slots=slots)
        sampler = Sampler(distributed.whole(actor, self.config), slots, settings.max_length)
        return Engine(sampler, chat, self.backend, settings, report)

    def seed(self, *parts: object) -> int:
        """A 63-bit seed that depends on the run's seed and `parts` alone."""
        return seed_of(self.config.seed, *parts)

    def finished(self, position: int, of: int, parts: Parts, metrics: Mapping[str, float]) -> None:
        """A training step is done: judge it by its metrics, save it where it is time to.

        Raises:
            Interrupted: where the user asked for a stop.
            CannotGoOn: where going on is pointless.
        """
        warning, reason = guard(metrics, self.progress.notes, self.config.rpr.max_logprob_gap)
        if warning:
            self.log.say(f"warning: {warning}")
        stop = any(distributed.gather("stop", self.stopping))
        if position % self.config.save_every == 0 or position == of or stop or reason:
            self.progress.save(position, parts)
        elif all(distributed.gather("written", self.progress.written())):
            self.progress.flush()
        if reason or stop:
            self.progress.flush()
            raise CannotGoOn(reason) if reason else Interrupted

    def stop_if_asked(self) -> None:
        """Raises Interrupted, everything saved, where the user asked any rank for a stop."""
        if any(distributed.gather("stop", self.stopping)):
            self.progress.flush()
            raise Interrupted

    def write(self, path: Path, lines: Sequence[str]) -> None:
        """Write a file of lines, the first rank for all."""
        if distributed.first():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(f"{line}\n" for line in lines))

    def set_aside(self, stage: str, phase: str, step: int, records: Sequence[Trajectory]) -> None:
        """Keep the attempts of a step whose gradient was not finite, for whoever looks into it."""
        self.write(self.run.folder / "failed" / f"{stage}-{phase}-{step}.jsonl", [to_json(x) for x in records])

    def collect(
        self,
        stage: str,
        name: str,
        jobs: Sequence[Job],
        harness: Harness,
        engine: Engine,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """Attempt every job, each rank its share, into the stage's file `name`; all records, in the order of `jobs`."""
        rank, ranks = distributed.rank(), distributed.world()
        mine = collect(jobs[rank::ranks], harness, engine, self.attempts(stage, name), temperature)
        shares = distributed.gather(f"{stage} {name}", mine, self.config.rollout.timeout)
        return [shares[position % ranks][position // ranks] for position in range(len(jobs))]

    def collect_once(
        self, stage: str, name: str, jobs: Sequence[Job], harness: Harness, actor: Transformer, chat: Chat
    ) -> list[Trajectory]:
        """Attempt every job with `actor`; where a killed run had finished that, its files are read instead."""
        paths = sorted((self.run.folder / "trajectories" / stage).glob(f"{name}.[0-9]*.jsonl"))
        distributed.meet(f"{stage} {name}")  # nobody writes before all have looked
        if paths:
            found = {(record.seed, record.runbook): record for path in paths for record in read(path)}
            return [found[job.seed, job.runbook] for job in jobs]
        with self.log.progress(f"{stage} {name}") as report:
            records = self.collect(stage, name, jobs, harness, self.engine(actor, chat, report))
        require_sound(f"{stage} {name}", records)
        self.progress.save(0)
        self.stop_if_asked()
        return records

    def attempts(self, stage: str, name: str) -> Path:
        """This rank's JSONL file for attempts of one kind in one stage."""
        return self.run.folder / "trajectories" / stage / f"{name}.{distributed.rank()}.jsonl"


def require_sound(what: str, records: Sequence[Trajectory], most: float = MAX_LOST) -> list[Trajectory]:
    """The attempts that the machine did not fail; CannotGoOn where it failed more than the share `most`, or where none
    of the others has a single token to learn from."""
    broken = [record for record in records if record.end == "infra_error"]
    if len(broken) > most * len(records):
        raise CannotGoOn(
            f"{what}: {len(broken)} of {len(records)} attempts failed for the machine's reasons, more than {most:.0%};"
            f" the last: {broken[-1].error}"
        )
    sound = [record for record in records if record.end != "infra_error"]
    if sound and not any(any(record.action) for record in sound):
        raise CannotGoOn(f"{what}: no attempt has room for a token: the prompts alone fill --rollout.max-length")
    return sound


@contextmanager
def open_session(run: Run, log: Log, device: torch.device, train: Pool, evaluation: Pool) -> Iterator[Session]:
    """Sandboxes and CPU threads for a run; leaves neither behind."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, run.config.threads // ranks))
    keep_freed_memory()
    with open_backend(run.config.sandbox, run=run.folder.name) as backend:
        log.say(f"sandboxes: {backend.kind} ({backend.reason})")
        yield Session(run, log, backend, device, train, evaluation)


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the text of `parts`."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prepare_tasks(config: Config) -> tuple[Pool, Pool]:
    """Training and evaluation tasks; the built-in ones are written into the run folder first."""
    folder = config.tasks
    if folder is None:
        folder = config.folder / "tasks"
        if not folder.is_dir() and distributed.first():
            partial = folder.with_name("tasks.partial")
            shutil.rmtree(partial, ignore_errors=True)
            write_tasks(partial / "train", "train", config.train_tasks, config.seed, config.families)
            write_tasks(partial / "eval", "eval", config.evaluate.tasks, 0, config.families)
            partial.rename(folder)
        distributed.meet("tasks")
    return load_pool(folder / "train"), load_pool(folder / "eval", config.evaluate.tasks)


def write_tasks(folder: Path, split: Split, count: int, seed: int, families: int | None) -> None:
    """Write `count` built-in tasks a suite as `folder/<suite>/<number>/`.

    Evaluation tasks do not depend on the run's seed: every run is measured on the same ones.
    """
    for suite in SUITES:
        for number, spec in enumerate(generate(split, suite, count, seed, families)):
            write_task(spec, folder / suite / f"{number:04d}")


def load_pool(folder: Path, count: int | None = None) -> Pool:
    """The tasks of every suite under `folder`, in name order, at most `count` a suite."""
    pool = {}
    for suite in SUITES:
        paths = sorted(path for path in (folder / suite).glob("[!.]*") if path.is_dir())
        if not paths:
            raise UserError(f"{folder / suite} holds no task folder: every suite needs one, {', '.join(SUITES)}")
        try:
            pool[suite] = [load_task(path) for path in paths[:count]]
        except TaskError as problem:
            raise UserError(str(problem)) from problem
    seen: dict[str, Task] = {}
    for task in (task for tasks in pool.values() for task in tasks):
        if task.steps:
            raise UserError(f"{task.folder} has [[steps]], and only tasks of one step are trained on: make each a task")
        if task.name in seen:
            raise UserError(f"{task.folder} and {seen[task.name].folder} are both called {task.name!r}: rename one")
        seen[task.name] = task
    return pool


def check_backend(backend: Backend, *pools: Pool) -> None:
    """Refuse tasks that the local backend cannot run, before anything is spent on the others."""
    for task in (task for pool in pools for tasks in pool.values() for task in tasks):
        if backend.kind == "local" and (task.docker_only or task.network):
            reason = task.docker_only or "it asks for a network"
            raise UserError(f"{task.folder} does not run in a local sandbox ({reason}): use --sandbox docker")
