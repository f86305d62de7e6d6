"""What the stages of one run share: tasks, tokenizer, sandboxes, device, log."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rsi_sandbox import Backend, Task, load_task

from rsi.chat import Chat
from rsi.checkpoint import Parts, Progress, Run
from rsi.config import SUITES, Config, UserError
from rsi.harness import Harness
from rsi.metrics import Log
from rsi.model import Transformer
from rsi.rollout import Engine, Job, collect
from rsi.sampler import Sampler
from rsi.tiny import Split, generate, write_task
from rsi.trajectory import Trajectory, read

Pool = dict[str, list[Task]]  # suite -> tasks


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
    progress: Progress | None = None
    stopping: bool = False

    @property
    def config(self) -> Config:
        return self.run.config

    def engine(self, actor: Transformer, chat: Chat, report: Callable[[int, int], None]) -> Engine:
        """Make attempts with `actor` as it is now and as it changes."""
        settings = self.config.rollout
        sampler = Sampler(actor, settings.slots, settings.max_length)
        return Engine(sampler, chat, self.backend, settings, report)

    def seed(self, *parts: object) -> int:
        """A 63-bit seed that depends on the run's seed and `parts` alone."""
        return seed_of(self.config.seed, *parts)

    def finished(self, position: int, of: int, parts: Parts) -> None:
        """A training step is done: save it where it is time to.

        Raises:
            Interrupted: where the user asked for a stop.
        """
        assert self.progress is not None
        if position % self.config.save_every == 0 or position == of or self.stopping:
            self.progress.save(position, parts)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raises Interrupted, everything saved, where the user asked for a stop."""
        if self.stopping:
            assert self.progress is not None
            self.progress.flush()
            raise Interrupted

    def collect_once(
        self, stage: str, name: str, jobs: Sequence[Job], harness: Harness, engine: Engine
    ) -> list[Trajectory]:
        """Attempt every job, into the stage's file `name`; a file that a killed run had finished is read."""
        assert self.progress is not None
        path = self.attempts(stage, name)
        if path.exists():
            found = {record.seed: record for record in read(path)}
            return [found[job.seed] for job in jobs]
        records = collect(jobs, harness, engine, path)
        self.progress.save(0)
        self.stop_if_asked()
        return records

    def attempts(self, stage: str, name: str) -> Path:
        """The JSONL file for attempts of one kind in one stage."""
        return self.run.folder / "trajectories" / stage / f"{name}.jsonl"


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the text of `parts`."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prepare_tasks(config: Config) -> tuple[Pool, Pool]:
    """Training and evaluation tasks; the built-in ones are written into the run folder first."""
    folder = config.tasks
    if folder is None:
        folder = config.folder / "tasks"
        if not folder.is_dir():
            partial = folder.with_name("tasks.partial")
            shutil.rmtree(partial, ignore_errors=True)
            write_tasks(partial / "train", "train", config.train_tasks, config.seed, config.families)
            write_tasks(partial / "eval", "eval", config.evaluate.tasks, 0, config.families)
            partial.rename(folder)
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
        paths = sorted(path.parent for path in (folder / suite).glob("*/task.toml"))
        if not paths:
            raise UserError(f"{folder / suite} holds no task (a folder with a task.toml): add some")
        pool[suite] = [load_task(path) for path in paths[:count]]
    seen: dict[str, Task] = {}
    for task in (task for tasks in pool.values() for task in tasks):
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
