"""The numbers of an evaluation, against values worked out by hand or by simulation."""

import random

import pytest

from rsi.evaluate import normal_interval, summarise, wilson


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20 at 95 %.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_intervals_cover_as_often_as_they_say() -> None:
    generator = random.Random(0)
    truth = (0.2, 0.5, 0.8, 0.4)
    covered = 0
    for _ in range(500):
        strata = [[float(generator.random() < rate) for _ in range(60)] for rate in truth]
        low, high = normal_interval(strata)
        covered += low <= sum(truth) / 4 <= high
    assert 0.92 <= covered / 500 <= 0.975


def outcomes(strict: list[float]) -> dict[str, dict[str, list[float]]]:
    return {suite: {"strict": strict, "process": strict, "greedy": strict} for suite in ("core", "swr")}


def test_the_difference_is_paired() -> None:
    before, after = outcomes([1, 0, 0, 1]), outcomes([1, 1, 0, 1])
    summary = summarise(after, before)
    assert summary["mean"] == 0.75 and summary["greedy_mean"] == 0.75 and summary["difference"] == 0.25
    low, high = summary["difference_ci95"]
    # Differences 0, 1, 0, 0 a suite: variance 1/4, two independent suites of four tasks.
    assert (high - low) / 2 == pytest.approx(1.959964 * (2 * 0.25 / 4) ** 0.5 / 2)
    same = summarise(before, before)
    assert same["difference"] == 0 and same["difference_ci95"] == (0, 0)


def test_without_a_stage_before_there_is_no_difference() -> None:
    summary = summarise(outcomes([1, 0]), None)
    assert summary["difference"] is None and summary["difference_ci95"] is None
    assert summary["suites"]["core"]["trials"] == 2
