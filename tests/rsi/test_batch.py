"""Packing is deterministic and complete, and predictions stand beside the tokens they predict."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi.batch import (
    collate,
    count_actions,
    gather_predictors,
    padded_length,
    plan_micro_batches,
    plan_step,
    predictor_index,
)
from rsi.trajectory import Trajectory

PROPERTY = settings(deadline=None, max_examples=100, derandomize=True)
PAD = 9
LENGTHS = st.lists(st.integers(1, 90), max_size=25)


def record(*parts: tuple[int, int], first_id: int = 10) -> Trajectory:
    """(sampled turn or -1, tokens) parts; ids count up so that every token is recognisable."""
    trajectory = Trajectory(task="t", family="f", suite="core", harness="terminus", seed=0)
    for turn, count in parts:
        start = first_id + len(trajectory.ids)
        ids = list(range(start, start + count))
        trajectory.extend(ids, turn, None if turn < 0 else [-0.5 * token for token in ids])
    return trajectory


TALK = record((-1, 3), (0, 2), (-1, 4), (1, 1), (-1, 2))
SILENT = record((-1, 20), first_id=50)


def test_fields_describe_the_token_at_their_position():
    batch = collate([SILENT, TALK], [1, 0], PAD)
    assert batch.ids_BT.shape == (2, 32) and batch.indices == (1, 0)
    assert batch.ids_BT[0, :12].tolist() == list(range(10, 22))
    assert batch.ids_BT[0, 12:].eq(PAD).all() and batch.ids_BT[1, 20:].eq(PAD).all()
    assert batch.action_BT.nonzero().tolist() == [[0, 3], [0, 4], [0, 9]]
    assert batch.target_N.tolist() == [13, 14, 19]
    assert batch.turn_BT[batch.action_BT].tolist() == [0, 0, 1]
    assert batch.turn_BT[~batch.action_BT].eq(-1).all()
    assert batch.logprob_N.tolist() == [-6.5, -7.0, -9.5]
    assert batch.row_N.tolist() == [0, 0, 0]
    assert batch.action_count == 3


def test_one_shift_the_row_before_describes_the_token():
    """The first action of a turn is predicted at the last observation token before it."""
    batch = collate([SILENT, TALK], [0, 1], PAD)
    position_BT = torch.arange(32).expand(2, 32)
    assert gather_predictors(position_BT, batch).tolist() == [2, 3, 8]
    assert gather_predictors(batch.ids_BT, batch).tolist() == [12, 13, 18]
    hidden_BTD = torch.randn(2, 32, 4)
    assert torch.equal(gather_predictors(hidden_BTD, batch), hidden_BTD[1, [2, 3, 8]])


def test_scatter_and_gather_are_inverse():
    batch = collate([TALK, record((-1, 1), (4, 3))], [0, 1], PAD)
    value_N = torch.randn(batch.action_count)
    value_BT = batch.scatter(value_N)
    assert torch.equal(batch.gather(value_BT), value_N)
    assert not value_BT[~batch.action_BT].any()


def test_a_row_cannot_begin_with_an_action():
    with pytest.raises(ValueError, match="begins with its prompt"):
        collate([record((0, 2))], [0], PAD)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        predictor_index(torch.tensor([[False, True], [True, False]]))


def test_broken_records_are_named():
    short = record((-1, 2), (0, 2))
    short.turn.pop()
    with pytest.raises(ValueError, match=r"trajectory 1 \(t\).*\(4, 4, 3, 4\)"):
        collate([TALK, short], [0, 1], PAD)
    lost = record((-1, 2), (0, 2))
    lost.turn[3] = -1
    with pytest.raises(ValueError, match="has no turn"):
        collate([lost], [0], PAD)


def test_records_without_sampler_log_probs_or_actions():
    supervised = record((-1, 2), (0, 2))
    supervised.logprob = []
    assert collate([supervised], [0], PAD).logprob_N.tolist() == [0.0, 0.0]
    silent = collate([SILENT], [0], PAD)
    assert silent.action_count == 0 and silent.scatter(torch.zeros(0)).shape == (1, 32)
    dummy = collate([], [], PAD)
    assert dummy.action_count == 0 and dummy.ids_BT.shape == (1, 16) and dummy.ids_BT.eq(PAD).all()


def test_moving_keeps_everything():
    batch = collate([TALK], [0], PAD)
    moved = batch.to("meta")
    assert moved.ids_BT.is_meta and moved.row_N.is_meta and moved.indices == (0,)


@PROPERTY
@given(LENGTHS, st.integers(1, 400))
def test_plan_is_a_partition_within_the_budget(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(index for group in plan for index in group) == list(range(len(lengths)))
    for group in plan:
        width = padded_length(max(lengths[index] for index in group))
        assert width % 16 == 0
        assert len(group) == 1 or len(group) * width <= max_tokens
        assert [lengths[index] for index in group] == sorted((lengths[index] for index in group), reverse=True)
    for group, following in pairwise(plan):
        assert lengths[group[-1]] >= lengths[following[0]]
        width = padded_length(lengths[group[0]])
        assert (len(group) + 1) * width > max_tokens, "the next sequence would have fitted"


def test_equal_lengths_keep_their_order():
    assert plan_micro_batches([5, 9, 5, 9, 5], 48) == [[1, 3, 0], [2, 4]]
    with pytest.raises(ValueError, match="got 0"):
        plan_micro_batches([5], 0)


@PROPERTY
@given(LENGTHS, st.integers(1, 5), st.integers(1, 400), st.integers(0, 3))
def test_a_step_deals_every_trajectory_once(lengths, minibatches, max_tokens, seed):
    plan = plan_step(lengths, minibatches, max_tokens, seed)
    assert plan == plan_step(lengths, minibatches, max_tokens, seed)
    assert len(plan) == minibatches
    dealt = [[index for group in minibatch for index in group] for minibatch in plan]
    assert sorted(index for members in dealt for index in members) == list(range(len(lengths)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for members, groups in zip(dealt, plan, strict=True):
        shape = plan_micro_batches([lengths[index] for index in sorted(members)], max_tokens)
        assert [len(group) for group in groups] == [len(group) for group in shape]


def test_the_seed_decides_the_deal():
    plans = {str(plan_step([20] * 12, 2, 1000, seed)) for seed in range(5)}
    assert len(plans) == 5
    with pytest.raises(ValueError, match="got 0"):
        plan_step([20], 0, 1000, 0)


def test_the_normaliser_counts_action_tokens_only():
    records = [TALK, SILENT, record((-1, 1), (0, 5))]
    assert count_actions(records, [0, 1, 2]) == 8
    assert count_actions(records, [1]) == 0
    assert count_actions(records, [0, 1, 2]) == collate(records, [0, 1, 2], PAD).action_count
