"""Packed micro-batches of trajectories, and the one place where predictions are lined up with their tokens.

Shape suffixes: T tokens of a micro-batch, S trajectories packed in it one after another, N action tokens in the order
of T, D hidden.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rsi.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees; every [T] field describes the token at its own position.

    For a trajectory with the prompt `p q`, a turn `a b`, an observation `o` and a turn `c`, and one with the prompt
    `r` and a turn `d`::

        ids_T        p  q  a  b  o  c  r  d
        action_T     0  0  1  1  0  1  0  1
        turn_T      -1 -1  0  0 -1  1 -1  0
        cu_seqlens   0  6  8
        predictor_N  1  2  4  6     (positions whose hidden state predicts a, b, c, d)
        target_N     a  b  c  d
    """

    ids_T: Tensor  # int64
    action_T: Tensor  # bool
    turn_T: Tensor  # int64, -1 where not an action
    cu_seqlens: Tensor  # int64 [S + 1], where each trajectory begins, and T
    logprob_N: Tensor  # float32, the sampler's
    predictor_N: Tensor  # int64, index into [T]
    target_N: Tensor  # int64
    indices: tuple[int, ...]  # which trajectory each is, in the sequence given to `collate`

    @property
    def action_count(self) -> int:
        return self.target_N.numel()

    def scatter(self, value_N: Tensor) -> Tensor:
        """[N] to [T], zero where not an action."""
        value_T = torch.zeros(self.ids_T.shape, dtype=value_N.dtype, device=value_N.device)
        value_T[self.action_T] = value_N
        return value_T

    def gather(self, value_T: Tensor) -> Tensor:
        """[T] (aligned to the token described) to [N]."""
        return value_T[self.action_T]

    def to(self, device: torch.device | str) -> "MicroBatch":
        fields = vars(self).items()
        moved: dict[str, Any] = {name: x.to(device) for name, x in fields if isinstance(x, Tensor)}
        return replace(self, **moved)


def predictor_index(action_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Where in a [T] output the prediction of every action token stands: row t-1 for token t.

    Log-probs and values are both read through this index, so they cannot disagree about the shift.

    Raises:
        ValueError: a trajectory begins with an action token, which nothing predicts.
    """
    filled_S = (cu_seqlens.diff() > 0).nonzero().squeeze(1)
    wrong = filled_S[action_T[cu_seqlens[filled_S]]].tolist()
    if wrong:
        raise ValueError(f"trajectories {wrong} begin with an action token; a trajectory begins with its prompt")
    return action_T.nonzero().squeeze(1) - 1


def gather_predictors(output_T: Tensor, batch: MicroBatch) -> Tensor:
    """[T] or [T, D] model output to [N] or [N, D], each row the one that predicts an action token."""
    return output_T.index_select(0, batch.predictor_N)


def collate(trajectories: Sequence[Trajectory], indices: Sequence[int], pad: int) -> MicroBatch:
    """Pack the chosen trajectories one after another.

    Trajectories without any action token are fine, and so are none: the result is then a single `pad`, so that a rank
    without work can join every collective. `logprob` may be empty (supervised records); it is then 0.

    Raises:
        ValueError: arrays of different lengths, an action token without a turn, or one at the very start.
    """
    chosen = [trajectories[index] for index in indices]
    for index, trajectory in zip(indices, chosen, strict=True):
        _check_record(index, trajectory)
    lengths = [len(trajectory.ids) for trajectory in chosen] or [1]
    ids_T = torch.tensor([token for x in chosen for token in x.ids] or [pad])
    action_T = torch.tensor([action for x in chosen for action in x.action] or [0]).bool()
    turn_T = torch.tensor([turn for x in chosen for turn in x.turn] or [-1])
    logprob_T = torch.tensor([value for x in chosen for value in x.logprob or [0.0] * len(x.ids)] or [0.0])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return MicroBatch(
        ids_T=ids_T,
        action_T=action_T,
        turn_T=turn_T.masked_fill(~action_T, -1),
        cu_seqlens=cu_seqlens,
        logprob_N=logprob_T[action_T],
        predictor_N=predictor_index(action_T, cu_seqlens),
        target_N=ids_T[action_T],
        indices=tuple(indices),
    )


def _check_record(index: int, trajectory: Trajectory) -> None:
    length = len(trajectory.ids)
    lengths = (length, len(trajectory.action), len(trajectory.turn), len(trajectory.logprob) or length)
    if len(set(lengths)) != 1:
        raise ValueError(
            f"trajectory {index} ({trajectory.task}): ids, action, turn and logprob must be equally long, got {lengths}"
        )
    if any(action and turn < 0 for action, turn in zip(trajectory.action, trajectory.turn, strict=True)):
        raise ValueError(f"trajectory {index} ({trajectory.task}): an action token has no turn")
    spans = [turn for (action, turn), _ in groupby(zip(trajectory.action, trajectory.turn, strict=True)) if action]
    if spans != sorted(set(spans)):
        raise ValueError(f"trajectory {index} ({trajectory.task}): its turns {spans} do not rise from one to the next")


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Pack indices into micro-batches of at most `max_tokens` tokens, as few as go and all about equally full.

    Each index, longest first, goes to the emptiest micro-batch, so the plan depends on nothing but the arguments. A
    sequence longer than `max_tokens` gets a micro-batch of its own. Their number is a multiple of `ranks`: where there
    are fewer sequences the last ones are empty. Fullest first.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    too_long = [[index] for index in order if lengths[index] > max_tokens]
    rest = order[len(too_long) :]
    count = -(-sum(lengths[index] for index in rest) // max_tokens)
    while True:
        count += -(len(too_long) + count) % ranks
        packed: list[list[int]] = [[] for _ in range(count)]
        emptiest = [(0, number) for number in range(count)]  # a heap of (tokens, micro-batch)
        for index in rest:
            tokens, number = emptiest[0]
            packed[number].append(index)
            heapq.heapreplace(emptiest, (tokens + lengths[index], number))
        fullest = sorted(emptiest, key=lambda entry: (-entry[0], entry[1]))
        if not fullest or fullest[0][0] <= max_tokens:
            return too_long + [packed[number] for _, number in fullest]
        count += 1


def deal(groups: Sequence[list[int]], rank: int, ranks: int) -> list[list[int]]:
    """One rank's micro-batches of an optimizer step, dealt back and forth (0, 1, …, 1, 0, 0, 1, …).

    `groups` is a multiple of `ranks`, fullest first, so that the ranks have as many and about as much to do.
    """
    assert len(groups) % ranks == 0, (len(groups), ranks)
    return [groups[start + (rank if start // ranks % 2 == 0 else ranks - 1 - rank)]
            for start in range(0, len(groups), ranks)]  # fmt: skip


def plan_step(
    lengths: Sequence[int], minibatches: int, max_tokens: int, seed: int, ranks: int = 1
) -> list[list[list[int]]]:
    """Deal a rollout into `minibatches` optimizer steps, each a list of micro-batches of indices.

    The deal is a seeded shuffle; sizes differ by at most one. Always `minibatches` entries (empty ones when
    there are fewer trajectories); it depends on nothing but the arguments, so every rank makes the same plan.
    """
    if minibatches < 1:
        raise ValueError(f"minibatches must be at least 1, got {minibatches}")
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    plan = []
    for start in range(minibatches):
        members = sorted(order[start::minibatches])
        groups = plan_micro_batches([lengths[index] for index in members], max_tokens, ranks)
        plan.append([[members[position] for position in group] for group in groups])
    return plan


def count_actions(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> int:
    """Action tokens of an optimizer step, whichever rank they are on: its losses' one normaliser."""
    return sum(sum(trajectories[index].action) for index in indices)
