"""Harnesses: what a turn is read as, and that reading undoes writing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsi.harness import Action, Outcome, get_harness

COMMANDS = st.text(min_size=1).filter(lambda text: text.strip() and not text.endswith("\n"))


@given(st.lists(COMMANDS, max_size=3), st.booleans(), st.text())
def test_terminus_reads_what_it_writes(commands: list[str], done: bool, plan: str) -> None:
    harness = get_harness("terminus")
    assert harness.parse(harness.write(commands, done, plan)) == Action(tuple(commands), done)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="`\r"), min_size=1))
def test_bash_reads_what_it_writes(command: str) -> None:
    command = command.strip("\n")
    harness = get_harness("bash")
    if command.strip() and command.strip() != "submit":
        assert harness.parse(harness.write([command], False)) == Action((command,), False)
        assert harness.parse(harness.write([command], False, "2")) == Action((command,), False)
    assert harness.parse(harness.write([], True)) == Action((), True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sort a.txt",
        '{"commands": [{"keystrokes": "ls\\n"}',
        '{"commands": "ls"}',
        '{"commands": [{"keys": "ls"}]}',
        '{"commands": ["ls"]}',
        '{"plan": "none"}',
        "[1]",
        '{"commands": ' + "[" * 100_000,
    ],
)
def test_terminus_explains_what_it_cannot_read(text: str) -> None:
    action = get_harness("terminus").parse(text)
    assert action.error and not action.commands and not action.done
    assert get_harness("terminus").observe(action, []).startswith("ERROR: ")


def test_terminus_takes_text_around_the_object_and_several_commands() -> None:
    reply = {"analysis": "a", "plan": "b", "commands": [{"keystrokes": "cd x\n"}, {"keystrokes": "ls"}], "more": 1}
    action = get_harness("terminus").parse(f"Sure:\n{json.dumps(reply)}\nDone.")
    assert action == Action(("cd x", "ls"), False)


def test_half_a_character_in_a_command_is_replaced() -> None:
    action = get_harness("terminus").parse('{"commands": [{"keystrokes": "echo \\ud83d \\udc80 \\ud83d\\ude00"}]}')
    assert action.commands == ("echo ? ? 😀",)


@pytest.mark.parametrize("text", ["", "ls", "```\nls\n```", "```bash\nls\n```\n```bash\npwd\n```"])
def test_bash_wants_exactly_one_block(text: str) -> None:
    assert get_harness("bash").parse(text).error


def test_the_sentinel_counts_as_the_command_only() -> None:
    harness = get_harness("bash")
    assert harness.parse("```bash\nsubmit\n```").done
    assert not harness.parse("```bash\necho submit\n```").done
    action = harness.parse("```bash\ncat note\n```")
    assert "submit" in harness.observe(action, [Outcome("submit\n", 0)])


def test_prompt_styles_and_runbook() -> None:
    for name in ("terminus", "bash", "rsrt"):
        brief, full = get_harness(name, "brief"), get_harness(name, "full")
        assert len(brief.prompt("Do it.")[0].content) < 12 < len(full.prompt("Do it.")[0].content)
        assert brief.prompt("Do it.")[1].content == "Do it."
        assert brief.prompt("Do it.", "# Runbook")[1].content == "Do it.\n\n# Runbook"
    assert get_harness("rsrt").prompt("x") == get_harness("terminus").prompt("x")


def test_an_unknown_harness_is_refused() -> None:
    with pytest.raises(ValueError, match="tmux"):
        get_harness("tmux")
