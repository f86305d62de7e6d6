"""RPR, recursive policy refinement: PPO with a critic, credit by TB-GAE.

The whole stage, in reading order: warm up a new critic on the swr tasks (rpr1 only), calibrate the critic
for a few steps with the actor frozen, then train both. Each step collects attempts, judges them, and
updates the critic before the actor.
"""

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from rsi_kernels import tb_gae
from rsi_sandbox import SandboxError, Task
from torch import Tensor

from rsi import ppo, rewards
from rsi.batch import MicroBatch, collate, count_actions, plan_step
from rsi.chat import Chat
from rsi.config import SUITES, Rpr
from rsi.evaluate import TARGET
from rsi.harness import get_harness
from rsi.model import Critic, Transformer
from rsi.rollout import Job, collect
from rsi.session import Pool, Session
from rsi.stages import Stage
from rsi.trajectory import ENDS, Trajectory

BETAS = (0.9, 0.98)
# Turns that grow this much over a stage's first joint step usually mean that length is being rewarded.
TURN_GROWTH = 1.5
# The end "turns" (the limit was reached) would take the name of the mean number of turns.
END_NAMES = {"turns": "max_turns"}


@dataclass
class Learner:
    """Both networks with their optimizers; `reference` is the stage's first actor where a KL asks for it."""

    actor: Transformer
    critic: Critic
    actor_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    reference: Transformer | None


@dataclass
class Prepared:
    """A micro-batch with everything that is fixed before the step's first update; all [N]."""

    batch: MicroBatch
    old_logprob: Tensor
    old_value: Tensor
    advantage: Tensor
    returns: Tensor
    reference_logprob: Tensor | None


def refine(session: Session, stage: Stage, actor: Transformer, critic: Critic | None, chat: Chat) -> Critic:
    """Run the stage: changes `actor` in place and returns the trained critic (a new one if none came in)."""
    settings = session.config.rpr
    fresh = Critic.from_actor(actor)
    critic = critic or fresh
    actor_lr = settings.actor_lr if stage.round == 1 else settings.actor_lr_later
    learner = Learner(
        actor,
        critic,
        torch.optim.AdamW(actor.parameters(), actor_lr, BETAS, weight_decay=0.0),
        torch.optim.AdamW(critic.parameters(), settings.critic_lr, BETAS, weight_decay=0.0),
        copy.deepcopy(actor).requires_grad_(False) if settings.kl_coefficient else None,
    )
    loop = Loop(session, stage, learner, chat)
    steps = plan_stage(settings, stage, len(session.train["swr"]))
    parts = {"actor": (actor, [learner.actor_optimizer]), "critic": (critic, [learner.critic_optimizer])}
    assert session.progress is not None
    start = session.progress.load(parts)
    for position, step in enumerate(steps[start:], start):
        rival = fresh if stage.critic == "inherit" and (step.phase, step.number) == ("calibration", 0) else None
        loop.step(step, rival)
        session.finished(position + 1, len(steps), parts)
    return critic


class Step(NamedTuple):
    """One step: `number` counts from 0 to `of` within its phase; only in "joint" the actor moves."""

    phase: Literal["warmup", "calibration", "joint"]
    number: int
    of: int
    suites: tuple[str, ...]
    attempts: int


def plan_stage(settings: Rpr, stage: Stage, warmup_tasks: int) -> list[Step]:
    """The stage's steps in order: warm-up where the critic is new (one epoch), calibration, joint."""
    steps = []
    if stage.critic == "create":
        batch = min(settings.warmup_batch, warmup_tasks)
        of = math.ceil(warmup_tasks / batch)
        steps += [Step("warmup", number, of, ("swr",), batch) for number in range(of)]
    of = settings.calibration_steps
    steps += [Step("calibration", number, of, SUITES, settings.attempts) for number in range(of)]
    of = settings.steps[min(stage.round, len(settings.steps)) - 1]
    steps += [Step("joint", number, of, SUITES, settings.attempts) for number in range(of)]
    return steps


class Loop:
    """One stage's steps, and what they have in common."""

    def __init__(self, session: Session, stage: Stage, learner: Learner, chat: Chat) -> None:
        self.session, self.stage, self.learner, self.chat = session, stage, learner, chat
        self.settings = session.config.rpr
        self.harness = get_harness(TARGET, session.config.rollout.prompt_style)
        self.scale = family_scales(session.train)

    def step(self, step: Step, rival: Critic | None = None) -> None:
        """Collect attempts, judge, update. `rival` is another critic to score on the same batch."""
        phase, number, of, suites, attempts = step
        train_actor = phase == "joint"
        begun = time.monotonic()
        seed = self.session.seed(self.stage.name, phase, number)
        tasks = draw(self.session.train, suites, attempts, number, self.session.seed(self.stage.name, phase))
        jobs = [Job(task, self.session.seed(seed, position)) for position, task in enumerate(tasks)]
        with self.session.log.progress(f"{self.stage.name} {phase} {number + 1}") as report:
            # A sampler of its own: what a step draws does not depend on which steps this process made before.
            engine = self.session.engine(self.learner.actor, self.chat, report)
            records = collect(jobs, self.harness, engine, self.session.attempts(self.stage.name, phase))
        collected = time.monotonic()
        metrics = rollout_metrics(records)
        usable = [record for record in records if record.end != "infra_error"]
        if not usable:
            raise SandboxError(f"every attempt of {phase} step {number + 1} failed: {records[0].error}")
        scores = [self.score(record) for record in usable]
        metrics["reward/mean"] = sum(scores) / len(scores)
        if self.settings.control == "shuffled_rewards":
            random.Random(seed).shuffle(scores)
        lengths = [len(record.ids) for record in usable]
        plan = plan_step(lengths, self.settings.minibatches, self.session.config.micro_batch_tokens, seed)
        prepared = [[self.prepare(usable, scores, group) for group in minibatch] for minibatch in plan]
        everything = [entry for minibatch in prepared for entry in minibatch]
        metrics |= self.describe(everything, rival)
        if self.settings.whiten:
            whiten(everything)
        sums: list[ppo.Metrics] = []
        total = 0
        for _ in range(self.settings.epochs if train_actor else self.settings.critic_only_epochs):
            for indices, minibatch in zip(plan, prepared, strict=True):
                tokens = count_actions(usable, [index for group in indices for index in group])
                total += tokens
                metrics["critic/grad_norm"] = self.update_critic(minibatch, tokens, sums)
                if train_actor:
                    metrics["actor/grad_norm"] = self.update_actor(minibatch, tokens, sums)
        metrics |= ppo.average_metrics(sums, total)
        metrics["actor/lr"] = self.learner.actor_optimizer.param_groups[0]["lr"] if train_actor else 0.0
        metrics["timing_s/rollout"] = collected - begun
        metrics["timing_s/update"] = time.monotonic() - collected
        metrics["timing_s/step"] = time.monotonic() - begun
        self.session.log.step(self.stage.name, phase, number + 1, of, metrics)
        if train_actor:
            self.watch_turns(number, metrics["rollout/turns"])

    def score(self, record: Trajectory) -> float:
        """The stage's reward of one attempt."""
        passed, total, strict, scale = record.passed, record.total, record.strict, self.scale[record.family]
        if self.stage.reward == "fdr":
            return rewards.fdr(passed, total, scale, strict, self.settings.fdr_cap)
        return rewards.spr(
            passed, total, scale, strict, self.settings.spr_bonus, self.settings.spr_failure, self.settings.fdr_cap
        )

    @torch.no_grad()
    def prepare(self, records: Sequence[Trajectory], scores: Sequence[float], indices: Sequence[int]) -> Prepared:
        """Old log-probs and values in the update's own packing, and TB-GAE on top of them."""
        batch = collate(records, indices, self.chat.pad).to(self.session.device)
        temperature = self.session.config.rollout.temperature
        old_logprob, _ = ppo.action_logprobs(self.learner.actor, batch, temperature)
        old_value = ppo.action_values(self.learner.critic, batch)
        score_B = torch.tensor([scores[index] for index in indices], device=self.session.device)
        advantage_BT, returns_BT = tb_gae(
            rewards.terminal_rewards(batch.action_BT, score_B),
            batch.scatter(old_value),
            batch.action_BT,
            batch.turn_BT,
            self.settings.gamma,
            self.settings.lam,
        )
        advantage = batch.gather(advantage_BT)
        if self.settings.control == "zero_advantages":
            advantage = torch.zeros_like(advantage)
        reference = self.learner.reference
        reference_logprob = ppo.action_logprobs(reference, batch, temperature)[0] if reference else None
        return Prepared(batch, old_logprob, old_value, advantage, batch.gather(returns_BT), reference_logprob)

    @torch.no_grad()
    def describe(self, prepared: Sequence[Prepared], rival: Critic | None) -> dict[str, float]:
        """Metrics of the whole step before any update."""
        old_value = torch.cat([entry.old_value for entry in prepared])
        returns = torch.cat([entry.returns for entry in prepared])
        advantage = torch.cat([entry.advantage for entry in prepared])
        gap = torch.cat([entry.old_logprob - entry.batch.logprob_N for entry in prepared])
        found = {
            "critic/vf_explained_var": ppo.explained_variance(old_value, returns),
            "critic/returns/mean": float(returns.mean()),
            "advantage/mean": float(advantage.mean()),
            "advantage/std": float(advantage.std(correction=0)),
            "advantage/nonzero_frac": float((advantage != 0).float().mean()),
            "rollout/logprob_gap": float(gap.abs().mean()),
            "rollout/logprob_gap_max": float(gap.abs().max()),
        }
        if rival is not None:
            values = torch.cat([ppo.action_values(rival, entry.batch) for entry in prepared])
            found["critic/fresh_vf_explained_var"] = ppo.explained_variance(values, returns)
        return found

    def update_critic(self, minibatch: Sequence[Prepared], tokens: int, sums: list[ppo.Metrics]) -> float:
        """One optimizer step on the value loss; returns the gradient norm before clipping."""
        self.learner.critic_optimizer.zero_grad()
        for entry in minibatch:
            value = ppo.action_values(self.learner.critic, entry.batch)
            loss, found = ppo.value_loss(value, entry.old_value, entry.returns, None, tokens, self.settings.value_clip)
            loss.backward()
            sums.append(found)
        return clip_and_step(self.learner.critic, self.learner.critic_optimizer, self.settings)

    def update_actor(self, minibatch: Sequence[Prepared], tokens: int, sums: list[ppo.Metrics]) -> float:
        """One optimizer step on the policy loss; returns the gradient norm before clipping."""
        settings = self.settings
        self.learner.actor_optimizer.zero_grad()
        for entry in minibatch:
            logprob, entropy = ppo.action_logprobs(
                self.learner.actor, entry.batch, self.session.config.rollout.temperature
            )
            cap = settings.importance_cap
            weights = None if cap is None else ppo.importance_weights(entry.old_logprob, entry.batch.logprob_N, cap)
            loss, found = ppo.policy_loss(
                logprob, entry.old_logprob, entry.advantage, None, tokens,
                settings.clip_low, settings.clip_high, settings.dual_clip,
                importance_weight=weights,
                entropy=entropy,
                entropy_bonus=settings.entropy_coefficient,
                reference_logprob=entry.reference_logprob,
                kl_coefficient=settings.kl_coefficient,
            )  # fmt: skip
            loss.backward()
            sums.append(found)
        return clip_and_step(self.learner.actor, self.learner.actor_optimizer, settings)

    def watch_turns(self, number: int, turns: float) -> None:
        """Say so, once, when attempts grow much longer than they were."""
        assert self.session.progress is not None
        notes = self.session.progress.notes
        if number == 0:
            notes["first_turns"] = turns
        elif turns > TURN_GROWTH * notes.get("first_turns", math.inf):
            self.session.log.say(
                f"warning: attempts grew from {notes.pop('first_turns'):.1f} to {turns:.1f} turns in"
                f" {self.stage.name}: length may be what the reward pays for"
            )


def family_scales(train: Pool) -> dict[str, float]:
    """S_f of every family of the training tasks."""
    checks: dict[str, list[int]] = {}
    for tasks in train.values():
        for task in tasks:
            checks.setdefault(task.family, []).append(task.checks)
    return rewards.family_scale(checks)


def draw(pool: Pool, suites: Sequence[str], count: int, step: int, seed: int) -> list[Task]:
    """The tasks of one step: equal shares of the suites, each suite in a seeded order, epoch after epoch."""
    chosen: list[Task] = []
    for position, suite in enumerate(suites):
        tasks = pool[suite]
        share = count // len(suites) + (position < count % len(suites))
        orders: dict[int, list[Task]] = {}
        for index in range(step * share, (step + 1) * share):
            epoch, place = divmod(index, len(tasks))
            if epoch not in orders:
                orders[epoch] = list(tasks)
                random.Random(f"{seed} {suite} {epoch}").shuffle(orders[epoch])
            chosen.append(orders[epoch][place])
    return chosen


def rollout_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """What the attempts of one step were like; shares are of all attempts, the machine's failures included."""
    count = len(records)
    usable = [record for record in records if record.end != "infra_error"]
    ends = Counter(record.end for record in records)
    return {
        "reward/strict": sum(record.strict for record in usable) / max(len(usable), 1),
        "rollout/turns": sum(record.turns for record in usable) / max(len(usable), 1),
        "rollout/tokens": float(sum(sum(record.action) for record in usable)),
        "rollout/parse_errors": float(sum(record.parse_errors for record in usable)),
        **{f"rollout/{END_NAMES.get(end, end)}": ends[end] / count for end in ENDS},
    }


def whiten(prepared: Sequence[Prepared]) -> None:
    """Whiten the advantages of the whole step in place."""
    whole = ppo.whiten(torch.cat([entry.advantage for entry in prepared]))
    for entry, part in zip(prepared, whole.split([len(entry.advantage) for entry in prepared]), strict=True):
        entry.advantage = part


def clip_and_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Rpr) -> float:
    """Clip the gradient's norm, step, and return the norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return float(norm)
