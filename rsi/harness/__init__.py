"""A harness renders a task and its history to messages and reads the model's turn as commands.

Harnesses differ in form only; `rsi.rollout` holds the one loop they share.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rsi.chat import Message

NOT_SOLVED = "The task is not solved yet. Check your work and go on."


class Action(NamedTuple):
    """What a turn asks for. With `error` set nothing runs and the model is told what was wrong."""

    commands: tuple[str, ...] = ()
    done: bool = False
    error: str | None = None


class Outcome(NamedTuple):
    """What a harness shows of a command: its output, and its exit code (None: killed by a limit)."""

    output: str
    exit_code: int | None
    limit: str | None = None


class Harness(Protocol):
    """`asks` is how often a declared completion may be judged mid-attempt (0: never)."""

    name: str
    fresh_shell: bool
    asks: int
    private: tuple[str, ...]

    def prompt(self, instruction: str, runbook: str | None = None) -> list[Message]:
        """The messages an attempt starts with."""

    def parse(self, text: str) -> Action:
        """The commands of one assistant turn; what cannot be read comes back as `Action.error`."""

    def write(self, commands: Sequence[str], done: bool, plan: str = "") -> str:
        """The canonical text of a turn: `parse(write(c, d, p)) == Action(c, d)`; `plan` is a note to itself."""

    def observe(self, action: Action, outcomes: Sequence[Outcome]) -> str:
        """The observation that follows a turn."""


def user_text(instruction: str, runbook: str | None) -> str:
    """The user's message: the instruction, and below it the runbook where one is given."""
    return instruction if runbook is None else f"{instruction}\n\n{runbook}"


def get_harness(name: str, prompt_style: str = "full") -> Harness:
    """The harness called `name`; `prompt_style` "brief" names the protocol, "full" explains it."""
    from rsi.harness.bash import Bash
    from rsi.harness.rsrt import Rsrt
    from rsi.harness.terminus import Terminus

    harnesses: dict[str, type[Terminus] | type[Bash]] = {"terminus": Terminus, "bash": Bash, "rsrt": Rsrt}
    if name not in harnesses:
        raise ValueError(f"harness {name!r} is unknown: choose one of {', '.join(harnesses)}")
    return harnesses[name](prompt_style)
