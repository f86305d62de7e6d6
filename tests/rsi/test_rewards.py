"""The inequalities that FDR and SPR promise, and where a reward is placed."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi.rewards import family_scale, fdr, spr, terminal_rewards

PROPERTY = settings(deadline=None, max_examples=200, derandomize=True)
SCALE = st.floats(0.5, 40.0) | st.just(0.0)
CAP = st.floats(0.1, 3.0)


@st.composite
def report(draw: st.DrawFn) -> tuple[int, int]:
    total = draw(st.integers(0, 40))
    return draw(st.integers(0, total)), total


@PROPERTY
@given(report(), SCALE, st.booleans(), CAP)
def test_fdr_is_bounded_and_grows_with_checks_passed(counts, scale, strict, cap):
    passed, total = counts
    value = fdr(passed, total, scale, strict, cap)
    if total == 0:
        assert value == (1.0 if strict else 0.0)
        return
    assert 0.0 <= value <= cap
    assert value == pytest.approx(min(passed / (scale or total), cap))
    if passed < total:
        more = fdr(passed + 1, total, scale, strict, cap)
        assert more > value or value == more == cap
    assert fdr(passed, total, scale, not strict, cap) == value


@PROPERTY
@given(report(), report(), SCALE, SCALE, st.floats(0, 2), st.floats(0, 1, exclude_max=True), CAP)
def test_spr_puts_every_success_above_every_failure(success, failure, scale, other_scale, bonus, partial, cap):
    best = spr(*success, scale, True, bonus, partial, cap)
    rest = spr(*failure, other_scale, False, bonus, partial, cap)
    assert best == 1.0 + bonus >= 1.0 > rest >= 0.0
    assert rest <= partial
    assert rest == pytest.approx(partial * min(fdr(*failure, other_scale, False, cap), 1.0))


@PROPERTY
@given(report(), SCALE)
def test_spr_rewards_partial_progress(counts, scale):
    passed, total = counts
    if 0 < total and passed < total:
        assert spr(passed + 1, total, scale, False) >= spr(passed, total, scale, False)
        assert (spr(passed, total, scale, False) > 0) == (passed > 0)


def test_spr_by_default():
    assert spr(4, 4, 8.0, True) == 1.0
    assert spr(4, 5, 8.0, False) == 0.25
    assert spr(12, 13, 8.0, False) == 0.5
    assert spr(0, 0, 1.0, False) == 0.0


@PROPERTY
@given(st.lists(st.integers(1, 30), min_size=20, max_size=60))
def test_scale_of_a_large_family_is_its_90th_percentile(sizes):
    scale = family_scale({"a": sizes})["a"]
    assert scale == numpy.percentile(sizes, 90)
    assert sum(size <= scale for size in sizes) >= 0.9 * len(sizes) - 1
    assert scale <= max(sizes)


@PROPERTY
@given(st.lists(st.integers(0, 30), max_size=19))
def test_scale_of_a_small_family_is_its_largest_checklist(sizes):
    assert family_scale({"a": sizes}) == {"a": float(max(sizes, default=0))}


def test_families_have_their_own_scale_and_tasks_without_a_report_do_not_count():
    scale = family_scale({"small": [2, 3], "large": [4] * 19 + [12], "edge": [4] * 18 + [12], "silent": [0, 0]})
    assert scale == {"small": 3.0, "large": 4.0, "edge": 12.0, "silent": 0.0}
    assert family_scale({"mixed": [0] * 15 + [5, 7]}) == {"mixed": 7.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fdr(5, 4, 1.0, True), "got 5 of 4"),
        (lambda: fdr(-1, 4, 1.0, True), "got -1 of 4"),
        (lambda: fdr(1, 4, -1.0, True), "scale must be at least 0"),
        (lambda: fdr(1, 4, 1.0, True, cap=-1.0), "cap -1.0"),
        (lambda: spr(1, 4, 1.0, True, bonus=-0.1), "-0.1"),
        (lambda: spr(1, 4, 1.0, False, partial=1.0), "1.0"),
        (lambda: family_scale({"a": [3, -2]}), "'a'.*-2"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@PROPERTY
@given(st.lists(st.lists(st.booleans(), max_size=7), max_size=5))
def test_the_reward_lands_on_the_last_action_token(rows):
    action = torch.tensor([flag for flags in rows for flag in flags], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0)
    placed = terminal_rewards(action, cu_seqlens, torch.arange(1, len(rows) + 1).double())
    assert placed.dtype == torch.float32 and placed.shape == action.shape
    for number, (flags, found) in enumerate(zip(rows, placed.split([len(flags) for flags in rows]), strict=True)):
        wanted = [0.0] * len(flags)
        if any(flags):
            wanted[max(t for t, flag in enumerate(flags) if flag)] = number + 1.0
        assert found.tolist() == wanted


def test_one_reward_a_trajectory():
    with pytest.raises(ValueError, match="one reward a trajectory"):
        terminal_rewards(torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 3]), torch.ones(3))
