"""Simulated transcripts against real bash, the tokenizer, and a short pretraining."""

import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi.chat import Chat
from rsi.config import INTERVALS, Pretrain
from rsi.model import ModelConfig, Transformer
from rsi.runbook import SECTIONS
from rsi.tiny import build_tokenizer, optimizers, pretrain
from rsi.tiny.habits import REDO_RIGHT, RIGHT, SLIP
from rsi.tiny.pretrain import encode, examples
from rsi.tiny.shell import Unsupported, World
from rsi.tiny.steps import KINDS
from rsi.tiny.tasks import FAMILIES, draw
from rsi.tiny.tokenizer import scaffolding
from rsi.tiny.transcripts import HARNESSES, act, draw_form, messages, transcript
from rsi.tiny.words import KEYS, WORDS

MEMBERS = [(family, suite) for suite, families in FAMILIES.items() for family in families]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer)


def lay(files: dict[str, str], folder: Path) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def bash(commands: list[str], folder: Path) -> list[tuple[str, int]]:
    """What real bash prints for each command, and its exit code; one process for them all."""
    script = "".join(f"({command}) 2>&1 </dev/null\nprintf '\\0%s\\0' $?\n" for command in commands)
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    done = subprocess.run(["/bin/bash", "-c", script], cwd=folder, env=environment, capture_output=True, check=True)
    parts = done.stdout.decode().split("\0")
    return [(parts[place], int(parts[place + 1])) for place in range(0, len(parts) - 1, 2)]


def state(folder: Path) -> tuple[dict[str, str], set[str], set[str]]:
    """Files, folders and executables of a real folder, as `World` holds them."""
    paths = [path for path in folder.rglob("*")]
    files = {str(path.relative_to(folder)): path.read_text() for path in paths if path.is_file()}
    modes = {str(path.relative_to(folder)) for path in paths if path.is_file() and path.stat().st_mode & 0o100}
    return files, {str(path.relative_to(folder)) for path in paths if path.is_dir()}, modes


@pytest.mark.parametrize(("family", "suite"), MEMBERS)
def test_simulated_output_and_effect_equal_real_bash(tmp_path, family, suite):
    """Right commands, habits and many slips: what is printed, the exit code and the files left."""
    rng = random.Random(1)
    rates = dict.fromkeys(RIGHT, 0.5)
    for number in range(25):
        spec = draw(family, suite, rng, "train")
        folder = tmp_path / str(number)
        folder.mkdir()
        lay(spec.files, folder)
        attempt = act(spec.steps, World(spec.files), rates, 0.25, rng)
        again = act(spec.steps, attempt.world, rates, 0.25, rng, attempt.outcomes)
        outcomes = [*attempt.outcomes, *again.outcomes]
        real = bash([*attempt.commands, *again.commands], folder)
        assert real == [(outcome.output, outcome.exit_code) for outcome in outcomes], attempt.commands
        assert state(folder) == (again.world.files, again.world.dirs, again.world.executable), attempt.commands


@pytest.mark.parametrize(
    "command",
    ["sort -n a.txt", "sed s/a/b/ a.txt", "rm -r d", "cat a.txt gone.txt", "sort a.txt > gone/b.txt", "find d", "tac"],
)
def test_what_is_not_simulated_is_refused(command):
    with pytest.raises(Unsupported):
        World({"a.txt": "x\n", "d/b.txt": ""}).run(command)


def test_transcripts_are_what_a_harness_would_say():
    """Every assistant turn parses to one command or the completion; only assistant turns are trained on."""
    rng = random.Random(2)
    for number in range(300):
        harness, runbook = draw_form(rng)
        form = HARNESSES[harness]
        spec = draw(*MEMBERS[number % len(MEMBERS)], rng, "train")
        lines = transcript(spec, harness, rng, runbook)
        prompt, rest = messages(lines)
        assert [line.trained for line in rest] == [place % 2 == 0 for place in range(len(rest))]
        assert rest[-1].content == form.write([], True)
        for line in rest[::2]:
            action = form.parse(line.content)
            assert action.error is None and len(action.commands) + action.done == 1
            plans = {step.plan for step in spec.steps} | {""}
            assert line.content in {form.write(action.commands, action.done, plan) for plan in plans}
        assert spec.instruction in prompt[-1].content
        assert all(f"{section}:" in prompt[-1].content for section in SECTIONS) == runbook


def test_a_transcript_follows_its_runbook():
    """Commands whose literals the instruction names stand in the runbook word for word."""
    rng = random.Random(3)
    followed = []
    for _ in range(200):
        spec = draw("edit", "core", rng, "train")
        prompt, rest = messages(transcript(spec, "terminus", rng, True))
        command = HARNESSES["terminus"].parse(rest[0].content).commands
        followed.append(bool(command) and f"1. {command[0]}" in prompt[-1].content)
    assert sum(followed) > 0.9 * len(followed)


def test_wrong_by_habit_at_the_rates_of_the_table_and_hardly_by_slips():
    rng = random.Random(4)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    slips = steps = 0
    for number in range(3000):
        spec = draw(*MEMBERS[number % len(MEMBERS)], rng, "train")
        lines = transcript(spec, "bash", rng)
        commands = [c for line in lines if line.trained for c in HARNESSES["bash"].parse(line.content).commands]
        steps += 1
        slips += len(commands) != len(spec.steps)
        for step, command in zip(spec.steps, commands, strict=False):
            if step.habit and "{" not in step.right + step.habit and command in (step.right, step.habit):
                total[step.kind] += 1
                right[step.kind] += command == step.right
    assert slips / steps < 0.05 and SLIP < 0.05
    for kind, (terminus, other) in RIGHT.items():
        assert 0.2 <= min(terminus, other) <= max(terminus, other) <= 0.6
        if total[kind] > 100:
            assert abs(right[kind] / total[kind] - other) < 4 * (0.25 / total[kind]) ** 0.5 + 0.02, kind
    assert len(total) >= 15 and REDO_RIGHT <= 0.6


def test_habits_are_where_the_table_says():
    rng = random.Random(5)
    specs = [draw(family, suite, rng, "train") for family, suite in MEMBERS for _ in range(40)]
    found = {step.kind for spec in specs for step in spec.steps if step.habit}
    assert found == set(RIGHT)
    assert set(RIGHT) - {"pick", "tally", "flow"} <= set(KINDS)


def test_names_and_scaffolding_are_one_token_wherever_they_stand(tokenizer, chat):
    for name in [*WORDS, *KEYS]:
        number = tokenizer.token_to_id(name)
        for text in (name, f"to {name}.txt", f"docs/{name}.txt", f"a:{name}:b", f"s/{name}/x/g", f"'1i {name}'"):
            assert tokenizer.encode(text).ids.count(number) == 1, text
    assert all(len(tokenizer.encode(part).ids) == 1 for part in scaffolding())
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.get_vocab_size() <= 1024
    turn = HARNESSES["terminus"].write(["sort -r amber.txt > copper.txt"], False)
    assert len(chat.encode_turn(turn)) <= 9


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    tokenizer = _cached()
    clean = text.encode("utf-8", "ignore").decode()
    assert Chat(tokenizer).decode(Chat(tokenizer).encode_turn(clean)) == clean


_built = []


def _cached():
    if not _built:
        _built.append(build_tokenizer())
    return _built[0]


def test_the_tokenizer_is_the_same_every_time_and_too_small_a_one_is_refused(tokenizer):
    assert build_tokenizer().to_str() == tokenizer.to_str()
    with pytest.raises(ValueError, match="too small: at least 474 are needed"):
        build_tokenizer(473)
    assert INTERVALS["model.vocab_size"] == "[474, inf)", "so that the command line refuses it"


def test_transcripts_are_short_enough(chat):
    records = examples(chat, random.Random(0), 400, ("core", "hard", "long", "swr"))
    for suite, limit in (("core", 80), ("hard", 170), ("long", 330), ("swr", 170)):
        lengths = [len(record.ids) for record in records if record.suite == suite]
        assert len(lengths) == 100 and sum(lengths) / len(lengths) <= limit
    turns = sum(max(record.turn) + 1 for record in records)
    assert sum(sum(record.action) for record in records) / turns <= 11
    assert max(len(record.ids) for record in records) < 640


def test_a_record_decodes_to_its_transcript_and_marks_the_assistants_tokens(chat):
    rng = random.Random(6)
    lines = transcript(draw("chain", "long", rng, "train"), "terminus", rng)
    record = encode(lines, chat)
    tokens = list(zip(record.ids, record.turn, strict=True))
    spans = [[token for token, turn in tokens if turn == number] for number in range(max(record.turn) + 1)]
    assert [chat.decode(span) for span in spans] == [line.content for line in lines if line.trained]
    assert all(span[-1] == chat.end for span in spans)
    assert record.action == [int(turn >= 0) for turn in record.turn]


def test_pretraining_learns_and_is_reproducible(tokenizer):
    def run() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        config = ModelConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, eos_token_id=2,
        )  # fmt: skip
        model = Transformer(config)
        plan = Pretrain(steps=16, batch=4)
        losses = [loss for _, loss in pretrain(model, optimizers(model, plan), tokenizer, plan, 0)]
        return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    losses, weights = run()
    again, same = run()
    assert len(losses) == 16 and losses[-1] < losses[0] - 0.2
    assert losses == again and torch.equal(weights, same)
