"""One dict a step: a line in `metrics.jsonl`, a line on the screen, a progress bar on a terminal."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rsi.report import open_console

# What the one line a step shows, in this order, of whatever the step logged, and what it is called there.
SHOWN = {
    "actor/sft_loss": "sft_loss", "reward/mean": "reward", "reward/strict": "strict", "actor/entropy": "entropy",
    "actor/pg_clipfrac": "pg_clipfrac", "actor/ppo_kl": "ppo_kl", "critic/vf_explained_var": "vf_explained_var",
    "rollout/turns": "turns", "rollout/logprob_gap": "logprob_gap", "timing_s/step": "seconds",
}  # fmt: skip


class Log:
    """Writes a run's metrics and messages; `log.txt` holds what the screen showed.

    Of several ranks the first alone shows anything and writes metrics; the others have a `log.<rank>.txt`.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.rank = rank
        self.console = open_console(highlight=False, soft_wrap=True, quiet=rank > 0)
        name = f"log.{rank}.txt" if rank else "log.txt"
        self.text = (folder / name).open("ab", buffering=0)  # nothing is left to write when a disk is full
        self.metrics = None if rank else folder / "metrics.jsonl"

    def say(self, message: str) -> None:
        """One line to the screen and to `log.txt`, with the time of day in the latter."""
        self.console.print(message, markup=False)
        self.write(f"{time.strftime('%H:%M:%S')} {message}\n")

    def write(self, text: str) -> None:
        """To `log.txt` alone."""
        self.text.write(text.encode())

    def fail(self, message: str, own: bool) -> None:
        """Say the line that ends the run, whatever of screen and disk is left to say it on.

        `own`: it is this rank's alone, so that it shows it whichever it is.
        """
        with contextlib.suppress(OSError):
            if own and self.console.quiet:
                print(f"[rank {self.rank}] {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.say(message)

    def step(self, stage: str, phase: str, step: int, of: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics; `step` counts from 1 within the phase."""
        # JSON knows no NaN: what is undefined (the explained variance of equal returns) is null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record: dict[str, Any] = {"stage": stage, "phase": phase, "step": step, **finite}
        if self.metrics:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        shown = (f"{label} {values[name]:.4g}" for name, label in SHOWN.items() if name in values)
        self.say(f"{stage} {phase} {step}/{of}  {'  '.join(shown)}")

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Any]:
        """A `report(done, of)` function behind a bar; silent where the screen is no terminal."""
        if not sys.stdout.isatty() or self.console.quiet:
            yield lambda done, of: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            entry = bar.add_task(label, total=None)
            yield lambda done, of: bar.update(entry, completed=done, total=of)

    def close(self) -> None:
        self.text.close()
