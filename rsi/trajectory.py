"""The record of one attempt: what the policy read, what it sampled, what came of it.

Everything is aligned *to the token it describes*; nothing is ever re-tokenised from text.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rsi.config import UserError

ENDS = ("done", "length", "turns", "agent_timeout", "infra_error")


class Exchange(NamedTuple):
    """One turn as text, for people, the planner and the leakage screen.

    `Exchange(("sort -r a.txt > b.txt",), "", feedback=False)`; `feedback` marks an observation that
    carries the verifier's one bit instead of a command's output.
    """

    commands: tuple[str, ...]
    output: str
    feedback: bool = False


@dataclass
class Trajectory:
    """One attempt at one task; `ids`, `action`, `turn`, `logprob` all have length T.

    Example (T = 6; the policy sampled tokens 3, 4 and the end-of-turn token 5)::

        ids     [1, 87, 14, 230, 231, 2]
        action  [0,  0,  0,   1,   1, 1]     1 = sampled by the policy
        turn    [-1, -1, -1,  0,   0, 0]     index of the assistant message, -1 elsewhere
        logprob [0., 0., 0., -.1, -.7, 0.]   the sampler's, 0 where not an action

    `end` is one of `ENDS`; an `infra_error` is the machine's failure, has weight 0 and no reward.
    """

    task: str
    family: str
    suite: str
    harness: str
    seed: int
    runbook: str | None = None
    ids: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    end: str = "infra_error"
    checks: dict[str, bool] = field(default_factory=dict)
    strict: bool = False
    reward: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    asks: int = 0
    parse_errors: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> int:
        """Checks passed."""
        return sum(self.checks.values())

    @property
    def total(self) -> int:
        """Checks in the report; 0 when the task reports none."""
        return len(self.checks)

    @property
    def turns(self) -> int:
        """Assistant messages."""
        return len(self.exchanges)

    def said(self, turn: int) -> list[int]:
        """The ids that the policy sampled in `turn`."""
        return [token for token, of in zip(self.ids, self.turn, strict=True) if of == turn]

    def extend(self, ids: list[int], turn: int = -1, logprob: list[float] | None = None) -> None:
        """Append prompt or observation tokens, or (with `logprob`) the sampled tokens of `turn`."""
        assert logprob is None or len(logprob) == len(ids), (len(logprob), len(ids))
        self.ids += ids
        self.action += [int(logprob is not None)] * len(ids)
        self.turn += [-1 if logprob is None else turn] * len(ids)
        self.logprob += [0.0] * len(ids) if logprob is None else logprob


def to_json(trajectory: Trajectory) -> str:
    """One line of JSON."""
    return json.dumps(dataclasses.asdict(trajectory), ensure_ascii=False, separators=(",", ":"))


def from_json(line: str) -> Trajectory:
    """Inverse of `to_json`."""
    record = json.loads(line)
    record["exchanges"] = [Exchange(tuple(c), o, f) for c, o, f in record["exchanges"]]
    return Trajectory(**record)


def read(path: Path) -> Iterator[Trajectory]:
    """The attempts in a JSONL file, in the order they were written. Raises UserError where a line is damaged."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = from_json(line)
            except (ValueError, TypeError, KeyError) as problem:
                raise UserError(
                    f"{path}, line {number} cannot be read ({problem}): restore or delete the file"
                ) from None
            yield record
