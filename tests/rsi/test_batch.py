"""Packing is deterministic and complete, and predictions stand beside the tokens they predict."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi.batch import (
    collate,
    count_actions,
    deal,
    gather_predictors,
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
    assert batch.ids_T.tolist() == [*range(10, 22), *range(50, 70)] and batch.indices == (1, 0)
    assert batch.cu_seqlens.tolist() == [0, 12, 32]
    assert batch.action_T.nonzero().squeeze(1).tolist() == [3, 4, 9]
    assert batch.target_N.tolist() == [13, 14, 19]
    assert batch.turn_T[batch.action_T].tolist() == [0, 0, 1]
    assert batch.turn_T[~batch.action_T].eq(-1).all()
    assert batch.logprob_N.tolist() == [-6.5, -7.0, -9.5]
    assert batch.action_count == 3


def test_one_shift_the_row_before_describes_the_token():
    """The first action of a turn is predicted at the last observation token before it."""
    batch = collate([SILENT, TALK], [0, 1], PAD)
    assert gather_predictors(torch.arange(32), batch).tolist() == [22, 23, 28]
    assert gather_predictors(batch.ids_T, batch).tolist() == [12, 13, 18]
    hidden_TD = torch.randn(32, 4)
    assert torch.equal(gather_predictors(hidden_TD, batch), hidden_TD[[22, 23, 28]])


def test_scatter_and_gather_are_inverse():
    batch = collate([TALK, record((-1, 1), (4, 3))], [0, 1], PAD)
    value_N = torch.randn(batch.action_count)
    value_T = batch.scatter(value_N)
    assert torch.equal(batch.gather(value_T), value_N)
    assert not value_T[~batch.action_T].any()


def test_a_trajectory_cannot_begin_with_an_action():
    """Packed, the token before it is another trajectory's: it must not be taken for its predictor."""
    with pytest.raises(ValueError, match="begins with its prompt"):
        collate([record((0, 2))], [0], PAD)
    with pytest.raises(ValueError, match=r"trajectories \[1\]"):
        predictor_index(torch.tensor([False, True, True, False]), torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=r"trajectories \[2\]"):  # the second one is empty
        predictor_index(torch.tensor([False, True, True, False]), torch.tensor([0, 2, 2, 4]))


def test_broken_records_are_named():
    short = record((-1, 2), (0, 2))
    short.turn.pop()
    with pytest.raises(ValueError, match=r"trajectory 1 \(t\).*\(4, 4, 3, 4\)"):
        collate([TALK, short], [0, 1], PAD)
    lost = record((-1, 2), (0, 2))
    lost.turn[3] = -1
    with pytest.raises(ValueError, match="has no turn"):
        collate([lost], [0], PAD)
    for spans in ([0, 0], [1, 0]):  # credit would not see where one turn ends and the next begins
        with pytest.raises(ValueError, match=rf"its turns \[{spans[0]}, {spans[1]}\] do not rise"):
            collate([record((-1, 2), (spans[0], 2), (-1, 3), (spans[1], 1))], [0], PAD)


def test_records_without_sampler_log_probs_or_actions():
    supervised = record((-1, 2), (0, 2))
    supervised.logprob = []
    assert collate([supervised], [0], PAD).logprob_N.tolist() == [0.0, 0.0]
    silent = collate([SILENT], [0], PAD)
    assert silent.action_count == 0 and silent.scatter(torch.zeros(0)).shape == (20,)
    dummy = collate([], [], PAD)
    assert dummy.action_count == 0 and dummy.ids_T.tolist() == [PAD] and dummy.cu_seqlens.tolist() == [0, 1]


def test_moving_keeps_everything():
    batch = collate([TALK], [0], PAD)
    moved = batch.to("meta")
    assert moved.ids_T.is_meta and moved.cu_seqlens.is_meta and moved.indices == (0,)


@PROPERTY
@given(LENGTHS, st.integers(1, 400), st.integers(1, 4))
def test_plan_is_a_partition_within_the_budget(lengths, max_tokens, ranks):
    plan = plan_micro_batches(lengths, max_tokens, ranks)
    assert plan == plan_micro_batches(lengths, max_tokens, ranks)
    assert sorted(index for group in plan for index in group) == list(range(len(lengths)))
    assert len(plan) % ranks == 0
    sizes = [sum(lengths[index] for index in group) for group in plan]
    assert all(size <= max_tokens or len(group) == 1 for size, group in zip(sizes, plan, strict=True))
    assert sizes == sorted(sizes, reverse=True)
    # Equally full: moving any sequence from the fullest shared one would not leave it below the emptiest.
    shared = [(size, group) for size, group in zip(sizes, plan, strict=True) if size <= max_tokens]
    if shared and shared[0][1]:
        (most, group), least = shared[0], shared[-1][0]
        assert most - min(lengths[index] for index in group) <= least


def test_micro_batches_are_few_and_full():
    plan = plan_micro_batches([100] * 20 + [10] * 100, 1000)
    assert [sum(100 if index < 20 else 10 for index in group) for group in plan] == [1000, 1000, 1000]


@PROPERTY
@given(LENGTHS, st.integers(50, 400), st.integers(1, 4))
def test_every_rank_has_as_many_micro_batches_and_about_as_much_to_do(lengths, max_tokens, ranks):
    groups = plan_micro_batches(lengths, max_tokens, ranks)
    shares = [deal(groups, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(map(str, groups)) == sorted(str(group) for share in shares for group in share)
    work = [sum(lengths[index] for group in share for index in group) for share in shares]
    assert max(work) - min(work) <= max(sum(lengths[index] for index in group) for group in groups or [[]])


def test_sequences_that_are_too_long_stand_alone():
    assert plan_micro_batches([5, 9, 5, 90, 5], 48, 2) == [[3], [1, 0, 2, 4]]
    assert plan_micro_batches([5, 9], 48, 4) == [[1], [0], [], []]
    assert plan_micro_batches([], 48, 3) == []
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
