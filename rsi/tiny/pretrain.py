"""Pretraining of the embedded model on synthetic transcripts: it learns to act, by habit often wrongly."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer

from rsi import distributed
from rsi.batch import collate, deal, plan_micro_batches
from rsi.chat import Chat
from rsi.config import Pretrain
from rsi.model import Transformer
from rsi.ppo import action_logprobs, supervised_loss
from rsi.tiny.tasks import draw, families_of
from rsi.tiny.transcripts import Line, draw_form, messages, transcript
from rsi.trajectory import Trajectory

MICRO_BATCH_TOKENS = 2048  # padded tokens of one pass: smaller ones pad less
EMBEDDING_STD = 0.1  # at the usual 0.02 names stay alike for 150 steps and nothing is copied from the instruction
WARMUP = 10  # steps
DECAY_SHARE = 0.4  # of the steps, the last ones: copying is learnt at full rate, all at once, at no fixed step
SHORT = ("core", "hard")
MIXED = ("long", "core", "hard", "long", "swr")  # long twice: one wrong name in any of its steps fails the task
LAST_RATE = 0.05  # of the learning rates, at the last step


def encode(lines: list[Line], chat: Chat, name: str = "", family: str = "", suite: str = "") -> Trajectory:
    """The transcript as a record, its tokens those of a real attempt; the assistant's are actions."""
    prompt, rest = messages(lines)
    record = Trajectory(task=name, family=family, suite=suite, harness="", seed=0, end="done")
    record.extend(chat.prompt(prompt))
    turn = 0
    for line in rest:
        if line.trained:
            ids = chat.encode_turn(line.content)
            record.extend(ids, turn, [0.0] * len(ids))
            turn += 1
        else:
            record.extend(chat.observation(line.content))
    return record


def examples(
    chat: Chat, rng: random.Random, count: int, suites: Sequence[str], limit: int | None = None, habit: float = 1.0
) -> list[Trajectory]:
    """Fresh transcripts of training tasks: the suites in turn, in each every family as frequent."""
    records = []
    for suite in itertools.islice(itertools.cycle(suites), count):
        family = rng.choice(families_of(suite, limit))
        harness, runbook = draw_form(rng)
        spec = draw(family, suite, rng, "train")
        records.append(encode(transcript(spec, harness, rng, runbook, habit), chat, spec.name, family, suite))
    return records


def optimizers(model: Transformer, settings: Pretrain) -> list[torch.optim.Optimizer]:
    """Muon for the block matrices, AdamW for embeddings, norms and head."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def pretrain(
    model: Transformer,
    chosen: list[torch.optim.Optimizer],
    tokenizer: Tokenizer,
    settings: Pretrain,
    seed: int,
    limit: int | None = None,
    start: int = 0,
) -> Iterator[tuple[int, float]]:
    """Train `model` in place; yields (steps done, loss in nats an action token) after each step.

    Every rank holds the same whole model. `chosen` are its `optimizers`. `limit` restricts the transcripts to
    the first families of every suite. `start` steps have been done before, with this model and these optimizers.
    """
    chat = Chat(tokenizer)
    device = next(model.parameters()).device
    if start == 0:
        with torch.no_grad():
            model.model.embed_tokens.weight *= EMBEDDING_STD / model.model.embed_tokens.weight.std()
    rates = (settings.muon_lr, settings.adamw_lr)
    for step in range(start, settings.steps):
        left = (settings.steps - step) / settings.steps
        share = min((step + 1) / WARMUP, max(LAST_RATE, left / DECAY_SHARE), 1.0)
        for optimizer, rate in zip(chosen, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
        suites = SHORT if step < settings.short_share * settings.steps else MIXED
        # A generator for each step: a resumed run goes on with the transcripts that were next.
        rng = random.Random(f"{seed} {step}")
        records = examples(chat, rng, settings.batch, suites, limit, settings.habit)
        tokens = sum(sum(record.action) for record in records)
        total = 0.0
        ranks = distributed.world()
        groups = plan_micro_batches([len(record.ids) for record in records], MICRO_BATCH_TOKENS, ranks)
        for group in deal(groups, distributed.rank(), ranks):
            batch = collate(records, group, chat.pad).to(device)
            logprob, _ = action_logprobs(model, batch, 1.0)
            loss, _ = supervised_loss(logprob, None, tokens)
            loss.backward()
            total += float(loss.detach())
        distributed.sum_gradients(model)
        total = sum(distributed.gather("loss", total))
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step + 1, total
