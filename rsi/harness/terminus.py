"""The target harness: JSON commands typed into one persistent shell.

The protocol follows Terminus 2 (`commands` of `keystrokes`, `task_complete`). It differs where a
trainer wants determinism: a command ends when the shell is done with it, not after a duration;
`analysis` and `plan` may be left out; completion is not asked for twice.
"""

import json
from collections.abc import Sequence

from rsi.chat import Message
from rsi.harness import Action, Outcome, user_text

FULL = """You work in a Linux shell to solve the user's task. Reply with one JSON object:
{"analysis": "what you see", "plan": "what you will do", "commands": [{"keystrokes": "ls -la\\n"}]}
Each keystrokes string is typed into the shell and ends with a newline. You then get the output.
When the task is solved, reply with {"commands": [], "task_complete": true}."""


class Terminus:
    """JSON in, terminal output back; shell state persists from turn to turn."""

    name = "terminus"
    fresh_shell = False
    asks = 0
    private: tuple[str, ...] = ("task_complete",)

    def __init__(self, prompt_style: str = "full") -> None:
        self.system = "terminus" if prompt_style == "brief" else FULL

    def prompt(self, instruction: str, runbook: str | None = None) -> list[Message]:
        return [Message("system", self.system), Message("user", user_text(instruction, runbook))]

    def parse(self, text: str) -> Action:
        start = text.find("{")
        if start < 0:
            return Action(error="no JSON object in the reply")
        try:
            reply, _ = json.JSONDecoder().raw_decode(text[start:])
        except (ValueError, RecursionError) as problem:
            return Action(error=f"the reply is not valid JSON: {problem}")
        done = str(reply.get("task_complete", False)).lower() in ("true", "1", "yes")
        entries = reply.get("commands", [] if done else None)
        if not isinstance(entries, list):
            return Action(error='"commands" must be a list')
        commands = []
        for entry in entries:
            keystrokes = entry.get("keystrokes") if isinstance(entry, dict) else None
            if not isinstance(keystrokes, str):
                return Action(error='each command must be an object with a "keystrokes" string')
            if keystrokes.strip():
                # JSON can name half a character (\ud83d), which no shell can be sent and no file can hold.
                commands.append(keystrokes.removesuffix("\n").encode(errors="replace").decode())
        return Action(tuple(commands), done)

    def write(self, commands: Sequence[str], done: bool, plan: str = "") -> str:
        reply: dict[str, object] = {"plan": plan} if plan else {}
        reply["commands"] = [{"keystrokes": f"{command}\n"} for command in commands]
        if done:
            reply["task_complete"] = True
        return json.dumps(reply, ensure_ascii=False, separators=(",", ":"))

    def observe(self, action: Action, outcomes: Sequence[Outcome]) -> str:
        if action.error:
            return f"ERROR: {action.error}"
        return "".join(
            outcome.output + (f"\n[stopped: {outcome.limit}]" if outcome.limit else "") for outcome in outcomes
        )
