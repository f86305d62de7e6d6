"""What people look at when a run ends: the stage table and `stages.svg`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from rsi.config import SUITES

COLOURS = {"core": "#4477aa", "hard": "#ee6677", "long": "#228833", "swr": "#aa3377", "mean": "#222222"}


class Screen(Console):
    """A screen that may go away: Ctrl-C ends a `tee` behind the run as well, and the run has yet to save."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console(**options: Any) -> Screen:
    """The screen; a log file has no width that a table would have to fit into."""
    return Screen(width=None if sys.stdout.isatty() else 160, **options)


def stage_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """Success in percent: sampled with its 95 % interval, greedy beside it, difference to the stage before."""
    table = Table(
        title=title, caption="success in %: sampled [95 % interval] · greedy; process = share of checks passed"
    )
    table.add_column("stage")
    for name in (*SUITES, "mean", "difference", "long process", "minutes"):
        table.add_column(name, justify="right")
    for record in records:
        evaluation = record["evaluation"]
        cells = [cell(evaluation["suites"][suite], "strict", "greedy") for suite in SUITES]
        cells.append(cell(evaluation, "mean", "greedy_mean"))
        cells.append("")
        if evaluation["difference"] is not None:
            difference, (low, high) = evaluation["difference"], evaluation["difference_ci95"]
            cells[-1] = f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        cells.append(f"{evaluation['suites']['long']['process']:.2f}")
        table.add_row(record["stage"], *cells, f"{record['seconds'] / 60:.1f}")
    return table


def cell(values: dict[str, Any], rate: str, greedy: str) -> str:
    """`45.0 [38, 52] · 50.0`"""
    low, high = values["ci95"]
    text = f"{100 * values[rate]:.1f} [{100 * low:.0f}, {100 * high:.0f}]"
    return text if values[greedy] is None else f"{text} · {100 * values[greedy]:.1f}"


def table_text(records: Sequence[dict[str, Any]]) -> str:
    """The same table in Markdown."""
    table = stage_table(records, "")
    cells = [list(column.cells) for column in table.columns]
    rows = [
        [str(column.header) for column in table.columns],
        ["---"] * len(cells),
        *map(list, zip(*cells, strict=True)),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_plot(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Success over the stages, a line a suite and one for the mean with its interval, as SVG."""
    width, height, left, top, right, bottom = 640, 400, 50, 40, 110, 40
    names = [record["stage"] for record in records]
    step = (width - left - right) / max(len(names) - 1, 1)

    def x(position: int) -> float:
        return left + position * step

    def y(rate: float) -> float:
        return top + (1 - rate) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        level = y(percent / 100)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{level:.1f}" y2="{level:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{level + 4:.1f}" text-anchor="end">{percent} %</text>')
    for position, name in enumerate(names):
        parts.append(f'<text x="{x(position):.1f}" y="{height - 16}" text-anchor="middle">{escape(name)}</text>')
    ends: list[tuple[float, str]] = []
    for series in (*SUITES, "mean"):
        of = [
            record["evaluation"] if series == "mean" else record["evaluation"]["suites"][series] for record in records
        ]
        rates = [entry["mean" if series == "mean" else "strict"] for entry in of]
        colour, stroke = COLOURS[series], 3 if series == "mean" else 1.5
        points = " ".join(f"{x(position):.1f},{y(rate):.1f}" for position, rate in enumerate(rates))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')
        for position, (entry, rate) in enumerate(zip(of, rates, strict=True)):
            parts.append(f'<circle cx="{x(position):.1f}" cy="{y(rate):.1f}" r="{stroke + 1}" fill="{colour}"/>')
            if series == "mean":
                low, high = (y(bound) for bound in entry["ci95"])
                column = f'x1="{x(position):.1f}" x2="{x(position):.1f}"'
                parts.append(f'<line {column} y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        ends.append((y(rates[-1]), series))
    floor = 0.0
    for level, series in sorted(ends):  # labels beside the last points, pushed apart where they would overlap
        floor = max(level + 4, floor + 15)
        parts.append(f'<text x="{width - right + 12}" y="{floor:.1f}" fill="{COLOURS[series]}">{series}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
