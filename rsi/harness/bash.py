"""One fenced bash command a turn, each in a fresh shell; `submit` as the command ends the attempt.

The form of mini-swe-agent, with the sentinel looked for in the *command*: a file that prints the
sentinel must not end an attempt.
"""

import re
from collections.abc import Sequence

from rsi.chat import Message
from rsi.harness import Action, Outcome, user_text

SUBMIT = "submit"
FENCE = re.compile(r"^```bash\n(.*?)\n?```[ \t]*$", re.DOTALL | re.MULTILINE)
FULL = f"""You work in a Linux shell to solve the user's task. Reply with exactly one command:
```bash
ls -la
```
Every command runs in a new shell: files persist, the directory and variables do not.
When the task is solved, send the command `{SUBMIT}`."""


class Bash:
    """A fenced command in, exit code and output back."""

    name = "bash"
    fresh_shell = True
    asks = 0
    private: tuple[str, ...] = (SUBMIT,)

    def __init__(self, prompt_style: str = "full") -> None:
        self.system = "bash" if prompt_style == "brief" else FULL

    def prompt(self, instruction: str, runbook: str | None = None) -> list[Message]:
        return [Message("system", self.system), Message("user", user_text(instruction, runbook))]

    def parse(self, text: str) -> Action:
        blocks = FENCE.findall(text)
        if len(blocks) != 1:
            return Action(error=f"expected exactly one ```bash block, found {len(blocks)}")
        command = blocks[0].strip("\n")
        return Action((), True) if command.strip() == SUBMIT else Action((command,), False)

    def write(self, commands: Sequence[str], done: bool, plan: str = "") -> str:
        assert len(commands) + done == 1, "bash takes one command a turn, or the submission"
        block = f"```bash\n{SUBMIT if done else commands[0]}\n```"
        return f"{plan}\n{block}" if plan else block

    def observe(self, action: Action, outcomes: Sequence[Outcome]) -> str:
        if action.error:
            return f"ERROR: {action.error}"
        output, code, limit = outcomes[0]
        return f"exit {code if limit is None else limit}\n{output}"
