"""Padded micro-batches of trajectories, and the one place where predictions are lined up with their tokens.

Shape suffixes: B rows (trajectories), T tokens, N action tokens of a micro-batch in row-major order, D
hidden.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rsi.trajectory import Trajectory

LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees; every [B, T] field describes the token at its own position.

    For one row with the prompt `p q`, a turn `a b`, an observation `o` and a turn `c`::

        ids_BT       p  q  a  b  o  c  pad...
        action_BT    0  0  1  1  0  1  0
        turn_BT     -1 -1  0  0 -1  1 -1
        predictor_N  1  2  4        (positions whose hidden state predicts a, b, c)
        target_N     a  b  c
    """

    ids_BT: Tensor  # int64, right-padded
    action_BT: Tensor  # bool, False in the padding
    turn_BT: Tensor  # int64, -1 where not an action
    logprob_N: Tensor  # float32, the sampler's
    predictor_N: Tensor  # int64, index into [B * T]
    target_N: Tensor  # int64
    row_N: Tensor  # int64, which row of the micro-batch an action token belongs to
    indices: tuple[int, ...]  # which trajectory each row is, in the sequence given to `collate`

    @property
    def action_count(self) -> int:
        return self.target_N.numel()

    def scatter(self, value_N: Tensor) -> Tensor:
        """[N] to [B, T], zero where not an action."""
        value_BT = torch.zeros(self.ids_BT.shape, dtype=value_N.dtype, device=value_N.device)
        value_BT[self.action_BT] = value_N
        return value_BT

    def gather(self, value_BT: Tensor) -> Tensor:
        """[B, T] (aligned to the token described) to [N]."""
        return value_BT[self.action_BT]

    def to(self, device: torch.device | str) -> "MicroBatch":
        fields = vars(self).items()
        moved: dict[str, Any] = {name: x.to(device) for name, x in fields if isinstance(x, Tensor)}
        return replace(self, **moved)


def predictor_index(action_BT: Tensor) -> Tensor:
    """Where in a flattened [B * T] output the prediction of every action token stands: row t-1 for token t.

    Log-probs and values are both read through this index, so they cannot disagree about the shift.

    Raises:
        ValueError: a row begins with an action token, which nothing predicts.
    """
    if action_BT.shape[1] and bool(action_BT[:, 0].any()):
        rows = action_BT[:, 0].nonzero().squeeze(1).tolist()
        raise ValueError(f"rows {rows} begin with an action token; a trajectory begins with its prompt")
    return action_BT.reshape(-1).nonzero().squeeze(1) - 1


def gather_predictors(output_BT: Tensor, batch: MicroBatch) -> Tensor:
    """[B, T] or [B, T, D] model output to [N] or [N, D], each row the one that predicts an action token."""
    return output_BT.flatten(0, 1).index_select(0, batch.predictor_N)


def collate(trajectories: Sequence[Trajectory], indices: Sequence[int], pad: int) -> MicroBatch:
    """Right-pad the chosen trajectories to one length, a multiple of 16.

    Trajectories without any action token are fine, and so are none: the result then has one row of padding, so
    that a rank without work can join every collective. `logprob` may be empty (supervised records); it is then 0.

    Raises:
        ValueError: arrays of different lengths, an action token without a turn, or one at the very start.
    """
    chosen = [trajectories[index] for index in indices]
    for index, trajectory in zip(indices, chosen, strict=True):
        _check_record(index, trajectory)
    shape = (max(len(chosen), 1), padded_length(max((len(x.ids) for x in chosen), default=0)))
    ids_BT = torch.full(shape, pad, dtype=torch.int64)
    action_BT = torch.zeros(shape, dtype=torch.bool)
    turn_BT = torch.full(shape, -1, dtype=torch.int64)
    logprob_BT = torch.zeros(shape, dtype=torch.float32)
    for row, trajectory in enumerate(chosen):
        length = len(trajectory.ids)
        ids_BT[row, :length] = torch.tensor(trajectory.ids, dtype=torch.int64)
        action_BT[row, :length] = torch.tensor(trajectory.action, dtype=torch.bool)
        turn_BT[row, :length] = torch.tensor(trajectory.turn, dtype=torch.int64)
        if trajectory.logprob:
            logprob_BT[row, :length] = torch.tensor(trajectory.logprob, dtype=torch.float32)
    return MicroBatch(
        ids_BT=ids_BT,
        action_BT=action_BT,
        turn_BT=turn_BT.masked_fill(~action_BT, -1),
        logprob_N=logprob_BT[action_BT],
        predictor_N=predictor_index(action_BT),
        target_N=ids_BT[action_BT],
        row_N=action_BT.nonzero()[:, 0],
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


def padded_length(length: int) -> int:
    return max(1, -(-length // LENGTH_MULTIPLE)) * LENGTH_MULTIPLE


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices by length so that rows times padded length stays within `max_tokens`.

    Longest first, equal lengths in the order given, so the plan depends on nothing else. A sequence that is
    longer than `max_tokens` by itself gets its own micro-batch.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    plan: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if plan and (len(plan[-1]) + 1) * width <= max_tokens:
            plan[-1].append(index)
        else:
            plan.append([index])
            width = padded_length(lengths[index])
    return plan


def deal(groups: Sequence[list[int]], rank: int, ranks: int) -> list[list[int]]:
    """One rank's micro-batches of an optimizer step: every rank gets as many, some of them empty if need be.

    Dealt back and forth (0, 1, …, 1, 0, 0, 1, …), so that groups that come largest first end up balanced.
    """
    rounds = -(-len(groups) // ranks)
    places = (number * ranks + (rank if number % 2 == 0 else ranks - 1 - rank) for number in range(rounds))
    return [groups[place] if place < len(groups) else [] for place in places]


def plan_step(lengths: Sequence[int], minibatches: int, max_tokens: int, seed: int) -> list[list[list[int]]]:
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
        groups = plan_micro_batches([lengths[index] for index in members], max_tokens)
        plan.append([[members[position] for position in group] for group in groups])
    return plan


def count_actions(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> int:
    """Action tokens of an optimizer step, whichever rank they are on: its losses' one normaliser."""
    return sum(sum(trajectories[index].action) for index in indices)
