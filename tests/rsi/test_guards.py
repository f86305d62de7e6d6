"""Steps that must not be taken, and runs that must not go on."""

import math
from typing import Any

import pytest
import torch

from rsi import distributed
from rsi.guards import IDLE, SKIPS, guard


@pytest.mark.parametrize("loss_of", [lambda w: (w + 3e38).sum(), lambda w: (w / 0 - w / 0).sum()])
def test_a_step_without_a_finite_loss_changes_nothing(loss_of: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loss = loss_of(weight)
    assert not loss.detach().isfinite()
    distributed.backward(loss)
    assert not math.isfinite(distributed.optimizer_step(model, optimizer, 1.0))
    assert weight.tolist() == [1, 1, 1] and not optimizer.state
    optimizer.zero_grad()
    distributed.backward(weight.square().sum())
    assert distributed.optimizer_step(model, optimizer, 1.0) == pytest.approx(math.sqrt(12))
    assert weight.tolist() == pytest.approx([0.899] * 3)  # one step and its decay


def test_skipped_steps_are_counted_in_a_row() -> None:
    notes: dict[str, Any] = {}
    bad = {"critic/grad_norm": math.nan, "actor/grad_norm": 1.0}
    for number in range(1, SKIPS):
        warning, reason = guard(bad, notes, 0.1)
        assert "is skipped" in warning and not reason and notes["skipped"] == number
    assert guard({"critic/grad_norm": 1.0}, notes, 0.1) == ("", "") and notes["skipped"] == 0
    found = [guard({"actor/grad_norm": math.inf}, notes, 0.1) for _ in range(SKIPS)]
    assert [bool(reason) for _, reason in found] == [False] * (SKIPS - 1) + [True]
    assert f"{SKIPS} steps in a row" in found[-1][1] and "failed/" in found[-1][1]


def test_a_gap_between_sampler_and_trainer_ends_the_run_above_its_limit() -> None:
    assert guard({"rollout/logprob_gap": 0.1}, {}, 0.1) == ("", "")
    _, reason = guard({"rollout/logprob_gap": 0.11}, {}, 0.1)
    assert (
        "0.11 nats" in reason
        and "--rpr.max-logprob-gap 0.1" in reason
        and "what is trained is not what acted" in reason
    )


@pytest.mark.parametrize("nothing", [{"advantage/nonzero_frac": 0.0}, {"actor/grad_norm": 0.0}])
def test_steps_that_move_nothing_are_said_once(nothing: dict[str, float]) -> None:
    notes: dict[str, Any] = {}
    said = [guard(nothing, notes, 0.1)[0] for _ in range(2 * IDLE)]
    assert [bool(text) for text in said] == [number == IDLE for number in range(1, 2 * IDLE + 1)]
    assert guard({"actor/grad_norm": 1.0, "advantage/nonzero_frac": 0.5}, notes, 0.1) == ("", "") and notes["idle"] == 0
