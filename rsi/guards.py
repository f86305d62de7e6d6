"""What ends or questions a run that goes on without getting anywhere: numbers that are not finite, a sampler that
disagrees with the trainer, steps that move nothing."""

import math
from collections.abc import Mapping
from typing import Any

from rsi_sandbox import SandboxError

SKIPS = 3  # steps skipped in a row after which going on is pointless
IDLE = 5  # steps in a row that moved nothing, after which the user is told
WAY_OUT = "the batch is in the run's failed/, a lower learning rate or gradient limit is the usual way out"


class CannotGoOn(RuntimeError):
    """What all ranks have found alike ends the run; the message says why and what to do."""


FAILURES = (SandboxError, OSError, CannotGoOn, FloatingPointError)
"""What ends a run that the same command goes on with."""


def guard(metrics: Mapping[str, float], notes: dict[str, Any], max_gap: float) -> tuple[str, str]:
    """Judge a step by its metrics: (a warning or "", the reason to stop or "").

    `notes` is where the counts are kept between steps; `max_gap` is in nats. A step whose gradient was not
    finite has not been taken (`optimizer_step`).
    """
    skipped = any(not math.isfinite(metrics.get(f"{name}/grad_norm", 0.0)) for name in ("actor", "critic"))
    notes["skipped"] = notes.get("skipped", 0) + 1 if skipped else 0
    if notes["skipped"] >= SKIPS:
        return "", f"{SKIPS} steps in a row had a gradient that is not finite: {WAY_OUT}"
    gap = metrics.get("rollout/logprob_gap", 0.0)
    if gap > max_gap:
        return "", (
            f"the sampler's log-probs differ from the trainer's by {gap:.3g} nats on average, more than"
            f" --rpr.max-logprob-gap {max_gap:g}: what is trained is not what acted (another precision, or weights"
            " that the sampler has not seen)"
        )
    if skipped:
        return "the gradient was not finite: the step is skipped, its batch is in the run's failed/", ""
    idle = metrics.get("advantage/nonzero_frac") == 0 or metrics.get("actor/grad_norm") == 0
    notes["idle"] = notes.get("idle", 0) + 1 if idle else 0
    if notes["idle"] == IDLE:
        return f"{IDLE} steps in a row moved nothing: all advantages or gradients are zero", ""
    return "", ""
