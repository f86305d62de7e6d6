"""The README's claim: the whole loop over several seeds, measured on the published task set.

    python bench/claim.py --seeds 0 1 2 --tasks 200

Runs (or goes on with) the main job once a seed, evaluates every stage on the published tasks, averages
over the seeds task by task, prints the table and writes `bench/results/claim.{md,svg,json}`. The last
line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rsi.evaluate import evaluate_published, summarise
from rsi.report import open_console, stage_table, table_text, write_plot

RESULTS = Path(__file__).parent / "results"


def average(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Outcomes of one stage, averaged over runs for every task."""
    return {
        suite: {
            kind: [sum(values) / len(runs) for values in zip(*(run[suite][kind] for run in runs), strict=True)]
            for kind in runs[0][suite]
        }
        for suite in runs[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=200, help="published tasks a suite")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    records = []
    for seed in arguments.seeds:
        command = [sys.executable, "-m", "rsi.train", "--seed", str(seed), "--runs", str(arguments.runs)]
        subprocess.run(command, check=True)
        records.append(evaluate_published(arguments.runs / f"tiny-{seed}", arguments.tasks))
    outcomes = [
        json.loads((arguments.runs / f"tiny-{seed}" / "published.json").read_text()) for seed in arguments.seeds
    ]
    means = {stage: average([outcome[stage] for outcome in outcomes]) for stage in outcomes[0]}
    table = [
        {
            "stage": of[0]["stage"],
            "seconds": sum(record["seconds"] for record in of) / len(of),
            "evaluation": summarise(means[of[0]["stage"]], means.get(of[0]["source"])),
            "means": [record["evaluation"]["mean"] for record in of],
            "differences": [record["evaluation"]["difference"] for record in of],
        }
        for of in zip(*records, strict=True)
    ]
    label = "seed" if len(arguments.seeds) == 1 else "mean of seeds"
    title = f"{label} {', '.join(map(str, arguments.seeds))}, {arguments.tasks} published tasks a suite"
    open_console().print(stage_table(table, title))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "claim.md").write_text(table_text(table), encoding="utf-8")
    write_plot(table, RESULTS / "claim.svg", title)
    line = json.dumps({"claim": table})
    (RESULTS / "claim.json").write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
