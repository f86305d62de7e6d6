"""RPR, recursive policy refinement: PPO with a critic, credit by TB-GAE.

The whole stage, in reading order: warm up a new critic on the swr tasks (rpr1 only), calibrate the critic
for a few steps with the actor frozen, then train both. Each step collects attempts, judges them, and
updates the critic before the actor.
"""

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from rsi_kernels import tb_gae
from rsi_sandbox import Task
from torch import Tensor

from rsi import distributed, ppo, rewards
from rsi.batch import MicroBatch, collate, count_actions, deal, plan_step
from rsi.chat import Chat
from rsi.checkpoint import Parts
from rsi.config import SUITES, Config, Rpr
from rsi.evaluate import TARGET
from rsi.guards import WAY_OUT, CannotGoOn
from rsi.harness import get_harness
from rsi.model import Critic, Transformer
from rsi.rollout import Job
from rsi.session import Pool, Session, require_sound
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

    def parts(self) -> Parts:
        """What is saved of it."""
        return {"actor": (self.actor, [self.actor_optimizer]), "critic": (self.critic, [self.critic_optimizer])}


@dataclass
class Prepared:
    """A micro-batch with everything that is fixed before the step's first update; all [N]."""

    batch: MicroBatch
    old_logprob: Tensor
    old_value: Tensor
    reference_logprob: Tensor | None
    advantage: Tensor = field(init=False)
    returns: Tensor = field(init=False)


def refine(session: Session, stage: Stage, actor: Transformer, critic: Critic | None, chat: Chat) -> Critic:
    """Run the stage: changes `actor` in place and returns the trained critic (a new one if none came in)."""
    critic = critic or distributed.copy_of(actor, Critic, session.config)
    loop = Loop(session, stage, make_learner(session.config, stage, actor, critic), chat)
    steps = plan_stage(session.config.rpr, stage, len(session.train["swr"]))
    parts = loop.learner.parts()
    start = session.progress.load(parts)
    for position, step in enumerate(steps[start:], start):
        # A stage that begins with calibration inherited its critic; on its first batch a new one is compared with it.
        compared = position == 0 and step.phase == "calibration"
        rival = distributed.copy_of(actor, Critic, session.config) if compared else None
        metrics = loop.step(step, rival)
        rival = None
        session.finished(position + 1, len(steps), parts, metrics)
    return critic


def make_learner(config: Config, stage: Stage, actor: Transformer, critic: Critic) -> Learner:
    """Give both networks optimizers, and the actor a copy where a KL asks for it."""
    settings = config.rpr
    reference = distributed.copy_of(actor, Transformer, config) if settings.kl_coefficient else None
    actor_lr = settings.actor_lr if stage.round == 1 else settings.actor_lr_later
    return Learner(
        actor,
        critic,
        torch.optim.AdamW(actor.parameters(), actor_lr, BETAS, weight_decay=0.0),
        torch.optim.AdamW(critic.parameters(), settings.critic_lr, BETAS, weight_decay=0.0),
        reference,
    )


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

    def step(self, step: Step, rival: Critic | None = None) -> dict[str, float]:
        """Collect attempts, judge, update; returns the metrics. `rival` is another critic to score on the batch."""
        begun = time.monotonic()
        records = self.collect(step)
        collected = time.monotonic()
        metrics = rollout_metrics(records)
        usable = require_sound(f"{self.stage.name} {step.phase} step {step.number + 1}", records)
        metrics |= self.learn(step, usable, rival)
        metrics["timing_s/rollout"] = collected - begun
        metrics["timing_s/update"] = time.monotonic() - collected
        metrics["timing_s/step"] = time.monotonic() - begun
        self.session.log.step(self.stage.name, step.phase, step.number + 1, step.of, metrics)
        if math.isnan(metrics["critic/grad_norm"]) or math.isnan(metrics.get("actor/grad_norm", 0.0)):
            self.session.set_aside(self.stage.name, step.phase, step.number + 1, usable)
        if step.phase == "joint":
            self.watch_turns(step.number, metrics["rollout/turns"])
        return metrics

    def collect(self, step: Step) -> list[Trajectory]:
        """The step's attempts."""
        session, name, phase = self.session, self.stage.name, step.phase
        tasks = draw(session.train, step.suites, step.attempts, step.number, session.seed(name, phase))
        seed = session.seed(name, phase, step.number)
        jobs = [Job(task, session.seed(seed, position)) for position, task in enumerate(tasks)]
        with session.log.progress(f"{name} {phase} {step.number + 1}") as report:
            # A sampler of its own: what a step draws does not depend on which steps this process made before.
            engine = session.engine(self.learner.actor, self.chat, report)
            return session.collect(name, phase, jobs, self.harness, engine)

    def learn(self, step: Step, records: Sequence[Trajectory], rival: Critic | None = None) -> dict[str, float]:
        """Judge the attempts and update critic and, in "joint", actor; every rank is given all of them."""
        settings, train_actor = self.settings, step.phase == "joint"
        seed = self.session.seed(self.stage.name, step.phase, step.number)
        scores = [self.score(record) for record in records]
        found = {"reward/mean": sum(scores) / len(scores)}
        if settings.control == "shuffled_rewards":
            random.Random(seed).shuffle(scores)
        lengths = [len(record.ids) for record in records]
        rank, ranks = distributed.rank(), distributed.world()
        plan = plan_step(lengths, settings.minibatches, self.session.config.micro_batch_tokens, seed, ranks)
        shares = [deal(groups, rank, ranks) for groups in plan]
        prepared = [[self.prepare(records, group) for group in share] for share in shares]
        everything = [entry for minibatch in prepared for entry in minibatch]
        self.require_finite(step, everything, records)
        for group, entry in zip(itertools.chain(*shares), everything, strict=True):
            self.give_credit(entry, [scores[index] for index in group])
        found |= self.describe(everything, rival)
        if settings.whiten:
            everywhere = gather_tokens("advantages", [entry.advantage for entry in everything])
            for entry in everything:
                entry.advantage = ppo.whiten(entry.advantage, everywhere)
        sums: list[ppo.Metrics] = []
        norms: dict[str, list[float]] = {"critic/grad_norm": []}
        total = 0
        for _ in range(settings.epochs if train_actor else settings.critic_only_epochs):
            for groups, minibatch in zip(plan, prepared, strict=True):
                tokens = count_actions(records, [index for group in groups for index in group])
                total += tokens
                share = tokens / ranks  # gradients are averaged over the ranks
                norms["critic/grad_norm"].append(self.update_critic(minibatch, share, sums))
                if train_actor:
                    norms.setdefault("actor/grad_norm", []).append(self.update_actor(minibatch, share, sums))
        # The last one, unless one of them was not finite: then that is what has to be seen.
        found |= {name: each[-1] if math.isfinite(sum(each)) else math.nan for name, each in norms.items()}
        found |= ppo.average_metrics(itertools.chain(*distributed.gather("metrics", sums)), total)
        found["actor/lr"] = self.learner.actor_optimizer.param_groups[0]["lr"] if train_actor else 0.0
        return found

    def score(self, record: Trajectory) -> float:
        """The stage's reward of one attempt."""
        passed, total, strict, scale = record.passed, record.total, record.strict, self.scale[record.family]
        if self.stage.reward == "fdr":
            return rewards.fdr(passed, total, scale, strict, self.settings.fdr_cap)
        return rewards.spr(
            passed, total, scale, strict, self.settings.spr_bonus, self.settings.spr_failure, self.settings.fdr_cap
        )

    @torch.no_grad()
    def prepare(self, records: Sequence[Trajectory], indices: Sequence[int]) -> Prepared:
        """Old log-probs and values in the update's own packing."""
        batch = collate(records, indices, self.chat.pad).to(self.session.device)
        temperature = self.session.config.rollout.temperature
        old_logprob, _ = ppo.action_logprobs(self.learner.actor, batch, temperature)
        old_value = ppo.action_values(self.learner.critic, batch)
        reference = self.learner.reference
        reference_logprob = ppo.action_logprobs(reference, batch, temperature)[0] if reference else None
        return Prepared(batch, old_logprob, old_value, reference_logprob)

    def require_finite(self, step: Step, prepared: Sequence[Prepared], records: Sequence[Trajectory]) -> None:
        """Raises CannotGoOn on all ranks where on any of them a network gives numbers that are not finite."""
        mine = all(bool((entry.old_value.isfinite() & entry.old_logprob.isfinite()).all()) for entry in prepared)
        if not all(distributed.gather("finite", mine)):
            self.session.set_aside(self.stage.name, step.phase, step.number + 1, records)
            where = f"{self.stage.name} {step.phase} step {step.number + 1}"
            raise CannotGoOn(f"values or log-probs of {where} are not finite: {WAY_OUT}")

    @torch.no_grad()
    def give_credit(self, entry: Prepared, scores: Sequence[float]) -> None:
        """Advantages and returns by TB-GAE, from each attempt's reward."""
        batch = entry.batch
        # Without attempts the batch is one token of padding.
        score_S = torch.tensor(list(scores) or [0.0], device=self.session.device)
        advantage_T, returns_T = tb_gae(
            rewards.terminal_rewards(batch.action_T, batch.cu_seqlens, score_S),
            batch.scatter(entry.old_value),
            batch.action_T,
            batch.turn_T,
            self.settings.gamma,
            self.settings.lam,
            cu_seqlens=batch.cu_seqlens,
        )
        entry.advantage, entry.returns = batch.gather(advantage_T), batch.gather(returns_T)
        if self.settings.control == "zero_advantages":
            entry.advantage = torch.zeros_like(entry.advantage)

    @torch.no_grad()
    def describe(self, prepared: Sequence[Prepared], rival: Critic | None) -> dict[str, float]:
        """Metrics of the whole step, on every rank, before any update."""
        old_value = gather_tokens("values", [entry.old_value for entry in prepared])
        returns = gather_tokens("returns", [entry.returns for entry in prepared])
        advantage = gather_tokens("advantages", [entry.advantage for entry in prepared])
        gap = gather_tokens("log-probs", [entry.old_logprob - entry.batch.logprob_N for entry in prepared])
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
            values = gather_tokens("rival values", [ppo.action_values(rival, entry.batch) for entry in prepared])
            found["critic/fresh_vf_explained_var"] = ppo.explained_variance(values, returns)
        return found

    def update_critic(self, minibatch: Sequence[Prepared], tokens: float, sums: list[ppo.Metrics]) -> float:
        """One optimizer step on the value loss; returns the gradient norm before clipping."""
        self.learner.critic_optimizer.zero_grad()
        for entry in minibatch:
            value = ppo.action_values(self.learner.critic, entry.batch)
            loss, found = ppo.value_loss(value, entry.old_value, entry.returns, None, tokens, self.settings.value_clip)
            distributed.backward(loss)
            sums.append(found)
        return distributed.optimizer_step(
            self.learner.critic, self.learner.critic_optimizer, self.settings.max_grad_norm
        )

    def update_actor(self, minibatch: Sequence[Prepared], tokens: float, sums: list[ppo.Metrics]) -> float:
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
            distributed.backward(loss)
            sums.append(found)
        return distributed.optimizer_step(self.learner.actor, self.learner.actor_optimizer, settings.max_grad_norm)

    def watch_turns(self, number: int, turns: float) -> None:
        """Say so, once, when attempts grow much longer than they were."""
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


def gather_tokens(what: str, parts: Sequence[Tensor]) -> Tensor:
    """One value a token from all ranks, the same on every rank."""
    mine = torch.cat([part.cpu() for part in parts])
    return torch.cat(distributed.gather(what, mine))
