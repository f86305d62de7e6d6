"""How good an actor is: the same tasks and seeds at every stage, no runbook, no feedback.

`python -m rsi.evaluate runs/NAME --tasks 200` measures a run's finished stages once more, on the published
task set, which no decision about the method or its settings may look at.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rsi_sandbox import Task

from rsi import distributed
from rsi.chat import Chat
from rsi.checkpoint import open_run, read_config, read_json, write_atomically
from rsi.config import SUITES, UserError, fail, require_numbers
from rsi.guards import FAILURES
from rsi.harness import get_harness
from rsi.metrics import Log
from rsi.model import Transformer
from rsi.report import open_console, stage_table
from rsi.rollout import Engine, Job
from rsi.session import Session, load_pool, open_session, require_sound, seed_of, write_tasks
from rsi.trajectory import Trajectory
from rsi.weights import load_actor, load_chat

TARGET = "terminus"
RETRIES = 2
MAX_INFRA_SHARE = 0.02
Z95 = 1.959964


def evaluate(session: Session, stage: str, source: str, actor: Transformer, chat: Chat, folder: Path) -> dict[str, Any]:
    """The `evaluation` object of `stages.json`; the outcome of every task goes to `folder`.

    `source` is the stage that the difference is taken to ("" for none).
    """
    before = read_json(session.run.path(source) / "evaluation.json") if source else None
    with session.log.progress(f"{stage} evaluation") as report:
        engine = session.engine(actor, chat, report)
        outcomes = attempt_all(session, stage, "evaluation", engine, session.config.evaluate.greedy)
    session.write(folder / "evaluation.json", [json.dumps(outcomes)])
    return summarise(outcomes, before)


def attempt_all(
    session: Session, stage: str, name: str, engine: Engine, greedy: bool
) -> dict[str, dict[str, list[float]]]:
    """Per suite: `strict`, `process` and `greedy` of every task, in the pool's order."""
    pool = session.evaluation
    tasks = [task for suite in SUITES for task in pool[suite]]
    sampled = attempt_each(session, stage, name, engine, tasks, None)
    best = attempt_each(session, stage, f"{name}-greedy", engine, tasks, 0.0) if greedy else None
    outcomes, start = {}, 0
    for suite in SUITES:
        part = slice(start, start + len(pool[suite]))
        start = part.stop
        outcomes[suite] = {
            "strict": [float(record.strict) for record in sampled[part]],
            "process": [process(record) for record in sampled[part]],
        }
        if best:
            outcomes[suite]["greedy"] = [float(record.strict) for record in best[part]]
    return outcomes


def attempt_each(
    session: Session, stage: str, name: str, engine: Engine, tasks: Sequence[Task], temperature: float | None
) -> list[Trajectory]:
    """One attempt a task; the machine's failures are retried, then count as the policy's."""
    harness = get_harness(TARGET, engine.settings.prompt_style)
    jobs = [Job(task, seed_of("evaluation", task.name)) for task in tasks]
    records = session.collect(stage, name, jobs, harness, engine, temperature)
    for _ in range(RETRIES):
        failed = [position for position, record in enumerate(records) if record.end == "infra_error"]
        if not failed:
            break
        again = session.collect(stage, name, [jobs[place] for place in failed], harness, engine, temperature)
        for position, record in zip(failed, again, strict=True):
            records[position] = record
    require_sound(f"{stage} {name}", records, MAX_INFRA_SHARE)
    return records


def process(record: Trajectory) -> float:
    """Share of checks passed, hidden ones included; without a report the strict outcome."""
    return record.passed / record.total if record.total else float(record.strict)


def summarise(
    outcomes: Mapping[str, Mapping[str, Sequence[float]]], before: Mapping[str, Mapping[str, Sequence[float]]] | None
) -> dict[str, Any]:
    """Rates a suite with Wilson intervals, their equal-weight mean, the paired difference to `before`."""
    suites: dict[str, dict[str, Any]] = {
        suite: {
            "strict": mean(of["strict"]),
            "greedy": mean(of["greedy"]) if "greedy" in of else None,
            "trials": len(of["strict"]),
            "ci95": wilson(sum(of["strict"]), len(of["strict"])),
            "process": mean(of["process"]),
        }
        for suite, of in outcomes.items()
    }
    low, high = normal_interval([of["strict"] for of in outcomes.values()])
    greedy = [suite["greedy"] for suite in suites.values()]
    summary: dict[str, Any] = {
        "suites": suites,
        "mean": mean([suite["strict"] for suite in suites.values()]),
        "ci95": (max(low, 0.0), min(high, 1.0)),
        "greedy_mean": mean(greedy) if None not in greedy else None,
        "difference": None,
        "difference_ci95": None,
    }
    if before is not None:
        paired = [
            [now - then for now, then in zip(of["strict"], before[suite]["strict"], strict=True)]
            for suite, of in outcomes.items()
        ]
        summary["difference"] = mean([mean(differences) for differences in paired])
        summary["difference_ci95"] = normal_interval(paired)
    return summary


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a rate."""
    rate, z2 = successes / trials, Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    # At rates 0 and 1 the bound is the rate itself, up to rounding.
    return min(max(0.0, centre - half), rate), max(min(1.0, centre + half), rate)


def normal_interval(strata: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % normal interval of the equal-weight mean of the strata's means."""
    variance = 0.0
    for values in strata:
        centre, count = mean(values), len(values)
        variance += sum((value - centre) ** 2 for value in values) / max(count - 1, 1) / count
    centre = mean([mean(values) for values in strata])
    half = Z95 * math.sqrt(variance) / len(strata)
    return centre - half, centre + half


def evaluate_published(run_folder: Path, tasks: int) -> list[dict[str, Any]]:
    """A run's stage records with their evaluation replaced by that on the published task set.

    The outcome of every task goes to `published.json`; a stage that is in there is not measured again. Raises UserError
    where that was another number of `tasks` a suite, or where no stage is finished.
    """
    run_folder = run_folder.resolve()
    run = open_run(read_config(run_folder))
    records = run.write_stages()
    if not records:
        raise UserError(f"{run_folder} has no finished stage yet: go on with rsi.train first")
    path, folder = run_folder / "published.json", run_folder / "published"
    found = read_json(path) if path.exists() else {}
    counts = {len(of["strict"]) for outcomes in found.values() for of in outcomes.values()}
    if counts - {tasks}:
        raise UserError(f"{path} holds {max(counts)} tasks a suite, not {tasks}: ask for as many, or delete it")
    missing = [record["stage"] for record in records if record["stage"] not in found]
    if missing:
        shutil.rmtree(folder, ignore_errors=True)
        write_tasks(folder, "published", tasks, 0, run.config.families)
        pool, log = load_pool(folder), Log(run_folder)
        with open_session(run, log, distributed.find_device(), pool, pool) as session:
            for stage in missing:
                actor = load_actor(run.path(stage) / "actor").to(session.device)
                chat = load_chat(run.path(stage) / "actor", actor.config, run.config.rollout.thinking)
                for old in session.attempts(stage, "published").parent.glob("published*.jsonl"):
                    old.unlink()
                with log.progress(f"{stage} published") as report:
                    engine = session.engine(actor, chat, report)
                    found[stage] = attempt_all(session, stage, "published", engine, greedy=True)
                write_atomically(path, json.dumps(found))
                log.say(f"{stage} measured on {tasks} published tasks a suite")
    return [
        record | {"evaluation": summarise(found[record["stage"]], found.get(record["source"]))} for record in records
    ]


def main() -> None:
    """Evaluate a run on the published tasks and print the table."""
    parser = argparse.ArgumentParser(prog="rsi.evaluate", description=evaluate_published.__doc__)
    parser.add_argument("run", type=Path, help="a run folder, such as runs/tiny-0")
    parser.add_argument("--tasks", type=int, default=200, help="published tasks a suite (200)")
    arguments = parser.parse_args()
    try:
        require_numbers("tasks", arguments.tasks)
        records = evaluate_published(arguments.run, arguments.tasks)
    except UserError as problem:
        fail(problem)
    except FAILURES as problem:
        print(f"rsi: error: {problem}; the same command goes on with the stage under way", file=sys.stderr)
        raise SystemExit(1) from problem
    except KeyboardInterrupt:
        print("rsi: stopped; the same command goes on with the stage under way", file=sys.stderr)
        raise SystemExit(130) from None
    open_console().print(stage_table(records, f"{arguments.run.name}: published tasks"))


if __name__ == "__main__":
    main()
