"""The run folder: what a run leaves on disk, and what makes a stage count as done.

A stage is written into `stages/<n>-<name>.partial` and renamed when everything in it is on disk, so a
stage folder without that suffix is whole. `stages.json` only repeats the folders' own `stage.json`.
"""

import dataclasses
import fcntl
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rsi import __version__
from rsi.config import Config, UserError, differences, from_record, to_record
from rsi.stages import Stage, schedule

PARTIAL = ".partial"


@dataclass
class Run:
    """An open run folder; `lock` keeps a second process out."""

    folder: Path
    config: Config
    lock: TextIO

    def path(self, stage: str) -> Path:
        """The finished folder of a stage."""
        number = [entry.name for entry in schedule(self.config)].index(stage)
        return self.folder / "stages" / f"{number}-{stage}"

    def done(self) -> set[str]:
        """Names of the finished stages."""
        return {stage.name for stage in schedule(self.config) if self.path(stage.name).is_dir()}

    def record(self, stage: str) -> dict[str, Any]:
        """A finished stage's `stage.json`."""
        record: dict[str, Any] = json.loads((self.path(stage) / "stage.json").read_text(encoding="utf-8"))
        return record

    def begin(self, stage: Stage) -> Path:
        """A fresh folder to write the stage into; what a killed try left of it is removed."""
        final = self.path(stage.name)
        partial = final.with_name(final.name + PARTIAL)
        for leftover in (partial, self.folder / "trajectories" / stage.name):
            shutil.rmtree(leftover, ignore_errors=True)
        (self.folder / "runbooks" / f"{stage.name}.jsonl").unlink(missing_ok=True)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n") and json.loads(line)["stage"] != stage.name]
            write_atomically(metrics, "".join(whole))
        partial.mkdir(parents=True)
        return partial

    def finish(self, stage: Stage, record: dict[str, Any]) -> None:
        """Make the stage count: its record, a flush to disk, the rename, then `stages.json`."""
        final = self.path(stage.name)
        partial = final.with_name(final.name + PARTIAL)
        write_atomically(partial / "stage.json", json.dumps(record, indent=1) + "\n")
        os.sync()
        partial.rename(final)
        self.write_stages()

    def write_stages(self) -> list[dict[str, Any]]:
        """Write `stages.json` from the finished stages' records; returns them in order."""
        done = self.done()
        records = [self.record(stage.name) for stage in schedule(self.config) if stage.name in done]
        write_atomically(self.folder / "stages.json", json.dumps(records, indent=1) + "\n")
        return records


def open_run(config: Config) -> Run:
    """Create the run folder or reopen it; another configuration or a live owner is refused."""
    folder = config.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --name")
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is in use by another process: wait for it, or choose another --name") from None
    path, record = folder / "config.json", to_record(config)
    if path.exists():
        found = differences(json.loads(path.read_text(encoding="utf-8"))["config"], record)
        if found:
            raise UserError(
                f"{folder} holds a run with another configuration: {'; '.join(found)}."
                " Choose another --name, or delete the folder"
            )
    else:
        write_atomically(path, json.dumps({"config": record, **versions()}, indent=1) + "\n")
    return Run(folder, config, lock)


def read_config(folder: Path) -> Config:
    """The configuration that a run folder was made with."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    config = from_record(json.loads(path.read_text(encoding="utf-8"))["config"])
    # The folder may have been moved, or the working directory may be another.
    return dataclasses.replace(config, runs=folder.parent, name=folder.name)


def versions() -> dict[str, str]:
    """What the run was made with."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "tokenizers", "numpy", "safetensors")}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "rsi": __version__,
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **found,
    }


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` so that a reader, or a kill, never meets half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
