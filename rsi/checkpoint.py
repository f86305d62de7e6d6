"""The run folder: what a run leaves on disk, and what makes a stage count as done.

A stage is written into `stages/<n>-<name>.partial` and renamed when everything in it is on disk, so a
stage folder without that suffix is whole. `stages.json` only repeats the folders' own `stage.json`.
While a stage is under way its `Progress` saves positions from which a killed run goes on.
"""

import dataclasses
import fcntl
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rsi import __version__, distributed
from rsi.config import Config, UserError, differences, from_record, to_record
from rsi.guards import CannotGoOn
from rsi.stages import Stage, missing_before, schedule

PARTIAL = ".partial"
KEEP = 2  # saved positions of a stage under way

Parts = Mapping[str, tuple[nn.Module, Sequence[torch.optim.Optimizer]]]
"""What a position saves: a name, a network, and the optimizers of its parameters."""


@dataclass
class Run:
    """An open run folder; the first rank's `lock` keeps a second run out."""

    folder: Path
    config: Config
    lock: TextIO | None = None

    def path(self, stage: str) -> Path:
        """The finished folder of a stage."""
        number = [entry.name for entry in schedule(self.config)].index(stage)
        return self.folder / "stages" / f"{number}-{stage}"

    def done(self) -> set[str]:
        """Names of the finished stages."""
        return {stage.name for stage in schedule(self.config) if self.path(stage.name).is_dir()}

    def missing(self) -> list[Stage]:
        """The stages that have yet to run, in order, for the configured one to be done."""
        return missing_before(self.config, self.done())

    def begin(self, stage: Stage) -> Path:
        """The folder to write the stage into: fresh, or at the last position that a killed try saved.

        What the try wrote after that position (attempts, metrics) is cut off: it is done again, once.
        """
        final = self.path(stage.name)
        partial = final.with_name(final.name + PARTIAL)
        if distributed.first():
            self._cut_back(stage, partial)
        distributed.meet(f"{stage.name} begun")
        return partial

    def _cut_back(self, stage: Stage, partial: Path) -> None:
        saved, files = read_progress(partial), self.appended(stage.name)
        if saved is None or any(files.get(name, -1) < size for name, size in saved["files"].items()):
            shutil.rmtree(partial, ignore_errors=True)
            saved = {"position": 0, "files": {}}
        metrics = self.folder / "metrics.jsonl"
        kept = saved["files"].pop(metrics.name, 0)
        if metrics.exists():
            text = metrics.read_bytes()
            # Beyond the saved length the whole lines of other stages stay: one may have run since.
            rest = [line for line in text[kept:].decode().splitlines(keepends=True) if line.endswith("\n")]
            # By how it begins (`Log.step`): a damaged line is no reason to stop.
            others = [line for line in rest if not line.startswith(f'{{"stage": "{stage.name}"')]
            write_atomically(metrics, text[:kept].decode() + "".join(others))
        for name in files:
            if name == metrics.name:
                continue
            if name in saved["files"]:
                os.truncate(self.folder / name, saved["files"][name])
            else:
                (self.folder / name).unlink()
        for old in (partial / "state").glob("[0-9]*"):
            if int(old.name) != saved["position"]:
                shutil.rmtree(old)
        partial.mkdir(parents=True, exist_ok=True)

    def appended(self, stage: str) -> dict[str, int]:
        """The size in bytes of every file that the stage appends to, by its path in the run folder."""
        paths = [self.folder / "metrics.jsonl", self.folder / "runbooks" / f"{stage}.jsonl"]
        paths += sorted((self.folder / "trajectories" / stage).glob("*.jsonl"))
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in paths if path.exists()}

    def finish(self, stage: Stage, record: dict[str, Any]) -> None:
        """Make the stage count: its record, a flush to disk, the rename, then `stages.json`."""
        final = self.path(stage.name)
        partial = final.with_name(final.name + PARTIAL)
        if distributed.first():
            write_atomically(partial / "stage.json", json.dumps(record, indent=1) + "\n")
            os.sync()
            partial.rename(final)
            shutil.rmtree(final / "state", ignore_errors=True)
        distributed.meet(f"{stage.name} finished")
        self.write_stages()

    def write_stages(self) -> list[dict[str, Any]]:
        """Write `stages.json` from the finished stages' records; returns them in order."""
        folders = [self.path(stage.name) for stage in schedule(self.config)]
        records = [read_json(folder / "stage.json") for folder in folders if folder.is_dir()]
        if distributed.first():
            write_atomically(self.folder / "stages.json", json.dumps(records, indent=1) + "\n")
        return records


@dataclass
class Progress:
    """The positions that a stage under way saves; with them a killed run ends as if it had not been.

    `state/<position>/` in the stage's folder holds networks and optimizers (torch's distributed checkpoint:
    it is written while training goes on, and read by another number of processes too). `state/progress.json`
    is written last, when the tensors are on disk: the position, what the caller noted, and how long every
    appended file was. Nothing draws from a global random generator, so no generator's state is saved.
    """

    run: Run
    stage: str
    folder: Path
    position: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    writing: Future[Any] | None = None
    record: dict[str, Any] | None = None

    @classmethod
    def of(cls, run: Run, stage: str, folder: Path) -> "Progress":
        """The progress of the stage that is written into `folder` (from `Run.begin`)."""
        saved = read_progress(folder) or {"position": 0, "notes": {}}
        return cls(run, stage, folder / "state", saved["position"], saved["notes"])

    def seconds(self) -> float:
        """How long the stage has taken, what was done before it was killed included."""
        before: float = self.notes.get("seconds", 0.0)
        return before + time.monotonic() - self.begun

    def load(self, parts: Parts) -> int:
        """Bring the networks and optimizers to the saved position and return it; 0 where there is none.

        Raises:
            CannotGoOn: what was saved cannot be read.
        """
        if not self.position:
            return 0
        folder, state = self.folder / f"{self.position:06d}", state_of(parts)
        try:
            dcp.load(state, checkpoint_id=folder)
        except CheckpointException as problem:
            raise CannotGoOn(
                f"{folder} cannot be read ({reason(problem)}): delete its parent to redo the stage"
            ) from None
        for name, (model, optimizers) in parts.items():
            found = state[name]
            set_state_dict(model, optimizers, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        return self.position

    def save(self, position: int, parts: Parts | None = None) -> None:
        """Save this position. With `parts` they are written in the background: it counts from `flush` on."""
        self.flush()
        notes = self.notes | {"seconds": self.seconds()}
        self.record = {"position": position, "notes": notes, "files": self.run.appended(self.stage)}
        if parts is None:
            self.flush()
            return
        target = self.folder / f"{position:06d}"
        if distributed.first():
            shutil.rmtree(target, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
        distributed.meet("save")
        writing = dcp.async_save(state_of(parts), checkpoint_id=target, process_group=distributed.GROUPS["saving"])
        assert isinstance(writing, Future)
        self.writing = writing

    def written(self) -> bool:
        """Whether this rank has written what the last save asked for."""
        return self.writing is None or self.writing.done()

    def flush(self) -> None:
        """Wait until the last save is on disk and make it count; all but the last `KEEP` positions then go.

        Raises:
            CannotGoOn: it could not be written; the position before it still counts.
        """
        if self.record is None:
            return
        try:
            if self.writing is not None:
                self.writing.result()
        except CheckpointException as problem:
            raise CannotGoOn(f"position {self.record['position']} cannot be saved: {reason(problem)}") from None
        distributed.meet("saved")
        if distributed.first():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "progress.json", json.dumps(self.record) + "\n")
            for old in sorted(path for path in self.folder.iterdir() if path.is_dir())[:-KEEP]:
                shutil.rmtree(old)
        self.position = self.record["position"]
        self.writing = self.record = None


def reason(problem: CheckpointException) -> str:
    """The first rank's failure, in one line."""
    failure, _ = next(iter(problem.failures.values()))
    if isinstance(failure, KeyboardInterrupt):  # torch takes it for one more failure
        raise failure
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What the last valid position of the stage in `folder` says; None where there is none."""
    path = folder / "state" / "progress.json"
    return read_json(path) if path.is_file() else None


def state_of(parts: Parts) -> dict[str, Any]:
    """Networks and optimizers as one nested dict, under names that do not depend on how they are spread."""
    state = {}
    for name, (model, optimizers) in parts.items():
        unused = [optimizer for optimizer in optimizers if not optimizer.state]
        weights, moments = get_state_dict(model, optimizers)
        for optimizer in unused:
            # To have moments at all torch made it take a step without gradients: it does not count.
            for entry in optimizer.state.values():
                if "step" in entry:
                    entry["step"].zero_()
        state[name] = {"model": weights, "optimizer": moments}
    return state


def open_run(config: Config) -> Run:
    """Create the run folder or reopen it; another configuration or a live owner is refused."""
    lock, problem = None, ""
    if distributed.first():
        try:
            lock = own_folder(config)
        except UserError as found:
            problem = str(found)
    (problem, *_) = distributed.gather("run folder", problem)
    if problem:
        raise UserError(problem)
    return Run(config.folder, config, lock)


def own_folder(config: Config) -> TextIO:
    """Make sure that this process alone has the run's folder, and that it holds this configuration."""
    folder = config.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as problem:
        raise UserError(f"{folder} cannot be written ({problem.strerror}): choose another --runs or --name") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is in use by another process: wait for it, or choose another --name") from None
    require_same(config)
    path = folder / "config.json"
    if not path.exists() or read_config(folder).rounds < config.rounds:
        write_atomically(path, json.dumps({"config": to_record(config), **versions()}, indent=1) + "\n")
    return lock


def require_same(config: Config) -> None:
    """Raises UserError where the run's folder was made with another configuration; more rounds may follow."""
    if not (config.folder / "config.json").exists():
        return
    old = read_config(config.folder)
    old = dataclasses.replace(old, rounds=max(old.rounds, config.rounds))
    found = differences(to_record(old), to_record(config))
    if found:
        raise UserError(
            f"{config.folder} holds a run with another configuration: {'; '.join(found)}."
            " Choose another --name, or delete the folder"
        )


def read_config(folder: Path) -> Config:
    """The configuration that a run folder was made with."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    config = from_record(read_json(path, "config"))
    # The folder may have been moved, or the working directory may be another.
    return dataclasses.replace(config, runs=folder.parent, name=folder.name)


def versions() -> dict[str, str]:
    """What the run was made with."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "rsi": __version__,
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: version(name) for name in ("torch", "tokenizers", "numpy", "safetensors")},
    }


def read_json(path: Path, key: str | None = None) -> Any:
    """What the file holds, or its entry `key`. Raises UserError, with what to do, where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if key is None else found[key]
    except (OSError, ValueError, TypeError, KeyError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise UserError(
            f"{path} cannot be read ({reason}): restore it, or delete {path.parent} and start over"
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` so that a reader, or a kill, never meets half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
