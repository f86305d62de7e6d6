"""RSR, recursive self-rewrite: turn successes of any harness into grounded attempts of the target harness.

The whole stage, in reading order: discover successes in complementary harnesses, write a runbook from
each, have it reviewed, re-execute it in a fresh sandbox under the target harness, keep what the verifier
passes, the leakage screen finds clean and did not stray, and train the actor on those attempts *without*
the runbook.
"""

import dataclasses
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rsi_sandbox import Task

from rsi import distributed, ppo
from rsi.batch import collate, count_actions, deal, plan_micro_batches
from rsi.chat import Chat
from rsi.config import SUITES
from rsi.evaluate import TARGET
from rsi.harness import get_harness
from rsi.leakage import screen
from rsi.model import Transformer
from rsi.rollout import Job
from rsi.runbook import plan, review, write_runbook
from rsi.session import Session
from rsi.stages import Stage
from rsi.trajectory import Trajectory, read, to_json

# How many times a rejected runbook goes back to the planner with the reviewer's objections.
REVISIONS = 1
# A family gives at most this multiple of the median family's kept attempts.
BALANCE = 2.0
MAX_GRAD_NORM = 1.0
# Said in the funnel where runbooks do not help.
LOST_READING = (
    "success with the runbook is not above success without; a likely cause: since the base transcripts no stage has"
    " trained on prompts that carry one"
)


class Rewrite(NamedTuple):
    """An approved runbook for a task, and how many turns the success took that it was written from."""

    task: Task
    runbook: str
    turns: int


def rewrite(
    session: Session, stage: Stage, actor: Transformer, chat: Chat, folder: Path, earlier: Sequence[Path]
) -> dict[str, Any]:
    """Run the stage: changes `actor` in place, returns the funnel.

    `earlier` are the kept attempts (`kept.jsonl`) of the rsr stages before: the supervised set grows.
    """
    settings = session.config.rsr
    tasks = choose_tasks(session, stage)
    found, funnel = discover(session, stage, actor, chat, tasks)
    rewrites = write_runbooks(session, stage, found, funnel)
    records = execute(session, stage, actor, chat, rewrites, funnel)
    kept = keep(session, records, rewrites, chat, funnel)
    session.write(folder / "kept.jsonl", [to_json(record) for record in kept])
    harness = get_harness(TARGET, session.config.rollout.prompt_style)
    everything = [record for path in earlier for record in read(path)] + kept
    instructions = {task.name: task.instruction for pool in session.train.values() for task in pool}
    examples = [
        supervised(record, chat.prompt(harness.prompt(instructions[record.task])))
        for record in balance(everything, settings.keep, session.seed(stage.name, "balance"))
    ]
    funnel["supervised"] = len(examples)
    funnel["tokens"] = count_actions(examples, range(len(examples)))
    session.log.say(f"{stage.name} funnel  {describe(funnel)}")
    train(session, stage, actor, chat, examples)
    return funnel


def choose_tasks(session: Session, stage: Stage) -> list[Task]:
    """The round's training tasks: the next ones of every suite, round after round."""
    count = session.config.rsr.tasks
    chosen = []
    for suite in SUITES:
        pool = session.train[suite]
        start = (stage.round - 1) * count
        chosen += [pool[index % len(pool)] for index in range(start, start + min(count, len(pool)))]
    return chosen


def discover(
    session: Session, stage: Stage, actor: Transformer, chat: Chat, tasks: Sequence[Task]
) -> tuple[list[tuple[Task, Trajectory]], dict[str, Any]]:
    """Attempt every task in every harness; the successes, and the funnel so far."""
    settings = session.config.rsr
    successes: dict[str, list[tuple[Task, Trajectory]]] = {}
    asks = attempts = 0
    for name in settings.harnesses:
        harness = get_harness(name, session.config.rollout.prompt_style)
        jobs = [
            Job(task, session.seed(stage.name, name, task.name, sample))
            for sample in range(settings.samples)
            for task in tasks
        ]
        records = session.collect_once(stage.name, f"discovery-{name}", jobs, harness, actor, chat)
        attempts += len(records)
        asks += sum(record.asks for record in records)
        successes[name] = [(job.task, record) for job, record in zip(jobs, records, strict=True) if record.strict]
    solved = {name: {task.name for task, _ in entries} for name, entries in successes.items()}
    funnel: dict[str, Any] = {
        "tasks": len(tasks),
        "attempts": attempts,
        "asks": asks,
        "successes": {name: len(entries) for name, entries in successes.items()},
        "tasks_solved": {name: len(names) for name, names in solved.items()},
        "tasks_solved_by_any": len(set().union(*solved.values())),
    }
    return [entry for entries in successes.values() for entry in entries], funnel


def write_runbooks(
    session: Session, stage: Stage, found: Sequence[tuple[Task, Trajectory]], funnel: dict[str, Any]
) -> list[Rewrite]:
    """At most `rsr.runbooks` approved runbooks a task; every one, approved or not, goes to the run folder."""
    private = private_commands(session)
    planner, reviewer = partial(plan, private=private), partial(review, private=private)
    approved: list[Rewrite] = []
    seen: set[tuple[str, str]] = set()
    count: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    written = 0
    lines = []
    # Shorter successes first: of two ways to solve a task the one with less detour is the better rewrite.
    for task, record in sorted(found, key=lambda entry: entry[1].turns):
        if count[task.name] >= session.config.rsr.runbooks:
            continue
        runbook, rounds = write_runbook(planner, reviewer, task.instruction, record.exchanges, REVISIONS)
        written += len(rounds)
        rejected.update(reason.split(":")[0] for reasons in rounds for reason in reasons)
        source = {"task": task.name, "harness": record.harness, "turns": record.turns}
        lines.append(json.dumps(source | {"runbook": runbook, "objections": rounds}, ensure_ascii=False))
        if runbook is not None and (task.name, runbook) not in seen:
            seen.add((task.name, runbook))
            count[task.name] += 1
            approved.append(Rewrite(task, runbook, record.turns))
    session.write(session.run.folder / "runbooks" / f"{stage.name}.jsonl", lines)
    funnel |= {"runbooks": written, "approved": len(approved), "rejected": dict(rejected)}
    return approved


def execute(
    session: Session, stage: Stage, actor: Transformer, chat: Chat, rewrites: Sequence[Rewrite], funnel: dict[str, Any]
) -> list[Trajectory]:
    """Re-execute every runbook in the target harness; the same tasks and seeds without it, for comparison."""
    harness = get_harness(TARGET, session.config.rollout.prompt_style)
    jobs = [
        Job(entry.task, session.seed(stage.name, "execute", entry.task.name, sample), entry.runbook)
        for entry in rewrites
        for sample in range(session.config.rsr.executions)
    ]
    records = session.collect_once(stage.name, "executions", jobs, harness, actor, chat)
    bare = [dataclasses.replace(job, runbook=None) for job in jobs]
    without = session.collect_once(stage.name, "executions-without", bare, harness, actor, chat)
    count = max(len(jobs), 1)
    funnel |= {
        "executed": len(jobs),
        "success_with_runbook": sum(record.strict for record in records) / count,
        "success_without_runbook": sum(record.strict for record in without) / count,
    }
    if funnel["success_with_runbook"] <= funnel["success_without_runbook"]:
        funnel["note"] = LOST_READING
    return records


def keep(
    session: Session, records: Sequence[Trajectory], rewrites: Sequence[Rewrite], chat: Chat, funnel: dict[str, Any]
) -> list[Trajectory]:
    """What the verifier passed, the leakage screen found clean and did not stray, duplicates dropped.

    An attempt strays when it takes more than `rsr.detour` times the turns of the success its runbook was written from,
    or when it never says that it is done. The verifier judges the end alone and passes such attempts, but they are long
    and hold wrong commands, or what was done after the task was solved; and as no two are alike, they would outnumber
    the clean ones, which are mostly duplicates.
    """
    private = private_commands(session)
    sources = {(entry.task.name, entry.runbook): entry for entry in rewrites}
    verified = [record for record in records if record.strict]
    screened: Counter[str] = Counter()
    strayed = 0
    kept: dict[tuple[str, tuple[int, ...]], Trajectory] = {}
    for record in verified:
        task, _, turns = sources[record.task, record.runbook or ""]
        reason = screen(
            record.exchanges,
            task.instruction,
            environment=texts(task.folder / "environment"),
            tests=texts(task.folder / "tests"),
            solution=texts(task.folder / "solution"),
            runbook=record.runbook,
            private=private,
            texts=[chat.decode(record.said(turn)) for turn in range(record.turns)],
        )
        if reason:
            screened[reason] += 1
        elif record.end != "done" or record.turns > session.config.rsr.detour * turns:
            strayed += 1
        else:
            kept.setdefault((record.task, tuple(record.ids)), record)
    funnel |= {"verified": len(verified), "screened_out": dict(screened), "strayed": strayed, "kept": len(kept)}
    return list(kept.values())


def private_commands(session: Session) -> tuple[str, ...]:
    """Every command that only one of the discovery harnesses knows."""
    names = session.config.rsr.harnesses
    return tuple(sorted({word for name in names for word in get_harness(name).private}))


def texts(folder: Path) -> dict[str, str]:
    """Every file under `folder` (none where it is missing) as text, by its path inside."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def balance(records: Sequence[Trajectory], per_task: int, seed: int) -> list[Trajectory]:
    """At most `per_task` attempts a task, and no family far above the median one; a seeded choice."""
    order = list(records)
    random.Random(seed).shuffle(order)
    by_task: Counter[str] = Counter()
    by_family: dict[str, list[Trajectory]] = {}
    for record in order:
        if by_task[record.task] < per_task:
            by_task[record.task] += 1
            by_family.setdefault(record.family, []).append(record)
    if not by_family:
        return []
    most = math.ceil(BALANCE * statistics.median(len(entries) for entries in by_family.values()))
    return [record for family in sorted(by_family) for record in by_family[family][:most]]


def supervised(record: Trajectory, prompt: list[int]) -> Trajectory:
    """The attempt as if no runbook had been there: another prompt, the same actions and observations.

    The sampler's log-probs belong to the other prompt and are dropped.
    """
    start = record.action.index(1)
    return dataclasses.replace(
        record,
        runbook=None,
        ids=prompt + record.ids[start:],
        action=[0] * len(prompt) + record.action[start:],
        turn=[-1] * len(prompt) + record.turn[start:],
        logprob=[],
    )


def train(session: Session, stage: Stage, actor: Transformer, chat: Chat, examples: Sequence[Trajectory]) -> None:
    """Supervised steps over the examples: a seeded order an epoch, the learning rate falling linearly."""
    settings = session.config.rsr
    if not examples:
        session.log.say(f"warning: {stage.name} kept no attempt, so the actor stays as it was")
        return
    optimizer = torch.optim.AdamW(actor.parameters(), settings.lr, weight_decay=0.0)
    ranks = distributed.world()
    batches = batch_order(len(examples), settings.batch, settings.epochs, session.seed(stage.name, "train"))
    parts = {"actor": (actor, [optimizer])}
    start = session.progress.load(parts)
    for number, chosen in enumerate(batches[start:], start):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - number / len(batches))
        lengths = [len(examples[index].ids) for index in chosen]
        tokens = count_actions(examples, chosen)
        optimizer.zero_grad()
        sums = []
        groups = plan_micro_batches(lengths, session.config.micro_batch_tokens, ranks)
        for group in deal(groups, distributed.rank(), ranks):
            batch = collate(examples, [chosen[position] for position in group], chat.pad).to(session.device)
            logprob, _ = ppo.action_logprobs(actor, batch, session.config.rollout.temperature)
            # Gradients are averaged over the ranks, so each divides by its share of the tokens.
            loss, found = ppo.supervised_loss(logprob, None, tokens / ranks)
            distributed.backward(loss)
            sums.append(found)
        norm = distributed.optimizer_step(actor, optimizer, MAX_GRAD_NORM)
        if not math.isfinite(norm):
            session.set_aside(stage.name, "train", number + 1, [examples[index] for index in chosen])
        everywhere = itertools.chain(*distributed.gather("metrics", sums))
        metrics = ppo.average_metrics(everywhere, tokens) | {"actor/grad_norm": norm}
        session.log.step(stage.name, "train", number + 1, len(batches), metrics)
        session.finished(number + 1, len(batches), parts, metrics)


def batch_order(count: int, batch: int, epochs: int, seed: int) -> list[list[int]]:
    """Index batches: every example once an epoch, the last batch of an epoch possibly smaller."""
    batches = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed} {epoch}").shuffle(order)
        batches += [order[start : start + batch] for start in range(0, count, batch)]
    return batches


def describe(funnel: dict[str, Any]) -> str:
    """The funnel as one line, what is counted by name in brackets."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return f"({', '.join(f'{key} {count}' for key, count in value.items()) or 'none'})"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    return "  ".join(f"{name} {text(value)}" for name, value in funnel.items())
