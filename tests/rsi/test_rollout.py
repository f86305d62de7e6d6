"""Attempts in real sandboxes, the policy's turns written in advance."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from rsi_sandbox import Backend, Task, load_task, open_backend

from rsi.chat import Chat
from rsi.config import Rollout
from rsi.harness import NOT_SOLVED, get_harness
from rsi.rollout import Engine, Job, collect
from rsi.tiny import build_tokenizer, generate, write_task
from rsi.trajectory import Trajectory, read

CHAT = Chat(build_tokenizer())
SETTINGS = Rollout(slots=2, workers=2, max_turns=4, max_turn_tokens=200, command_timeout=60.0)


class Script:
    """Plays each attempt's turns in order; stands where the sampler does."""

    def __init__(self, turns: dict[int, list[str]]) -> None:
        self.turns, self.seeds, self.read = turns, dict[int, int](), dict[int, list[list[int]]]()
        self.asked: dict[int, tuple[list[int], list[float]]] = {}
        self.order: list[int] = []
        self.taken: set[int] = set()

    @property
    def open_slots(self) -> int:
        return len(self.taken)

    def open(self, seed: int) -> int:
        slot = next(number for number in itertools.count() if number not in self.taken)
        self.taken.add(slot)
        self.seeds[slot] = seed
        return slot

    def close(self, slot: int) -> None:
        self.taken.remove(slot)

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    def submit(self, slot: int, new: list[int], max_tokens: int) -> None:
        self.read.setdefault(slot, []).append(list(new))
        self.order.append(self.seeds[slot])
        ids = CHAT.encode_turn(self.turns[self.seeds[slot]].pop(0))[:max_tokens]
        self.asked[slot] = (ids, [-0.5] * len(ids))

    def advance(self, stops: Collection[int], temperature: float) -> dict[int, tuple[list[int], list[float]]]:
        """One turn at a time, the last one asked for first."""
        return dict([self.asked.popitem()])


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with open_backend("local", "test-rollout") as opened:
        yield opened


@pytest.fixture
def task(tmp_path: Path) -> Task:
    spec = next(spec for spec in generate("train", "core", 60, 0) if spec.composition == ("reverse",))
    write_task(spec, tmp_path / "task")
    return load_task(tmp_path / "task")


def solution(task: Task) -> str:
    return (task.folder / "solution" / "solve.sh").read_text()


def attempt(
    backend: Backend, task: Task, turns: list[str], path: Path, harness: str = "terminus", **settings: float
) -> tuple[Trajectory, Script]:
    script = Script({7: list(turns)})
    engine = Engine(script, CHAT, backend, dataclasses.replace(SETTINGS, **settings))  # type: ignore[arg-type]
    (record,) = collect([Job(task, 7)], get_harness(harness, "brief"), engine, path)
    assert script.open_slots == 0
    assert list(read(path))[-1] == record
    return record, script


def commands(*lines: str, done: bool = False) -> str:
    return get_harness("terminus").write(lines, done)


DONE = commands(done=True)


def test_a_solved_task_and_the_alignment_of_its_record(backend: Backend, task: Task, tmp_path: Path) -> None:
    turns = [commands("cd / && pwd"), commands("pwd; cd /app"), commands(solution(task)), DONE]
    record, script = attempt(backend, task, turns, tmp_path / "a.jsonl")
    assert record.strict and record.end == "done" and record.reward == 1 and all(record.checks.values())
    assert [exchange.output for exchange in record.exchanges] == ["/\n", "/\n", "", ""]
    # Tokens in, tokens out: the record is the prompt, then sampled turns and observations, nothing else.
    harness = get_harness("terminus", "brief")
    ids = CHAT.prompt(harness.prompt(task.instruction))
    for number, turn in enumerate(turns):
        assert record.ids[: len(ids)] == ids and record.action[len(ids)] == 1
        sampled = CHAT.encode_turn(turn)
        span = slice(len(ids), len(ids) + len(sampled))
        assert record.action[span] == [1] * len(sampled) and record.turn[span] == [number] * len(sampled)
        ids += sampled
        if number < len(turns) - 1:
            ids += CHAT.observation(record.exchanges[number].output)
    assert record.ids == ids and len(record.action) == len(record.turn) == len(record.logprob) == len(ids)
    assert all((action == 0) == (turn == -1) for action, turn in zip(record.action, record.turn, strict=True))
    # The policy read exactly the record's other tokens, once each.
    unsampled = [token for token, action in zip(record.ids, record.action, strict=True) if not action]
    assert [token for new in script.read[0] for token in new] == unsampled


def test_doing_nothing_is_a_failure(backend: Backend, task: Task, tmp_path: Path) -> None:
    record, _ = attempt(backend, task, [DONE], tmp_path / "a.jsonl")
    assert record.end == "done" and not record.strict and record.passed == 0 < record.total


def test_what_cannot_be_read_comes_back_as_an_observation(backend: Backend, task: Task, tmp_path: Path) -> None:
    record, _ = attempt(backend, task, ["sort it", DONE], tmp_path / "a.jsonl")
    assert record.parse_errors == 1 and record.exchanges[0].output.startswith("ERROR: ")
    assert record.end == "done"


def test_what_a_turn_thinks_is_no_command(backend: Backend, task: Task, tmp_path: Path) -> None:
    thought = f"<think>\nFirst {commands('touch wrong')}, no:\n</think>\n\n"
    record, _ = attempt(backend, task, [thought + commands("ls"), DONE], tmp_path / "a.jsonl")
    assert record.exchanges[0].commands == ("ls",) and record.parse_errors == 0
    fenced = "<think>\n```bash\ntouch wrong\n```\n</think>\n\n```bash\nls\n```"
    record, _ = attempt(backend, task, [fenced, "```bash\nsubmit\n```"], tmp_path / "b.jsonl", "bash")
    assert record.exchanges[0].commands == ("ls",) and record.parse_errors == 0


def test_limits_end_an_attempt_by_name_and_it_is_judged_all_the_same(
    backend: Backend, task: Task, tmp_path: Path
) -> None:
    record, _ = attempt(backend, task, [commands(solution(task))] + [commands("ls")] * 5, tmp_path / "a.jsonl")
    assert record.end == "turns" and record.turns == 4 and record.strict
    record, _ = attempt(backend, task, [commands("echo " + "x" * 300)], tmp_path / "b.jsonl", max_turn_tokens=20)
    assert record.end == "length" and not record.exchanges[0].commands and record.total > 0
    record, _ = attempt(backend, task, [commands("seq 1000"), DONE], tmp_path / "c.jsonl")
    assert record.end == "length" and record.turns == 1 and len(record.ids) < SETTINGS.max_length
    slow = dataclasses.replace(task, agent_timeout=3.0)
    record, _ = attempt(backend, slow, [commands("sleep 300"), DONE], tmp_path / "d.jsonl")
    assert record.end == "agent_timeout" and record.turns == 1


def test_a_command_that_hangs_is_stopped_and_the_model_told(backend: Backend, task: Task, tmp_path: Path) -> None:
    record, _ = attempt(backend, task, [commands("sleep 30"), DONE], tmp_path / "a.jsonl", command_timeout=0.3)
    assert "[stopped: " in record.exchanges[0].output and record.end == "done"


def test_the_machines_failure_is_no_failure_of_the_policy(backend: Backend, task: Task, tmp_path: Path) -> None:
    no_tests = dataclasses.replace(task, tests=())
    record, _ = attempt(backend, no_tests, [DONE], tmp_path / "a.jsonl")
    assert record.end == "infra_error" and "reward.txt" in record.error and not record.checks
    cannot_start = dataclasses.replace(task, memory_mb=1)
    record, _ = attempt(backend, cannot_start, [DONE], tmp_path / "b.jsonl")
    assert record.end == "infra_error" and record.error and record.turns <= 1


def test_rsrt_tells_one_bit_and_lets_the_attempt_go_on(backend: Backend, task: Task, tmp_path: Path) -> None:
    turns = [commands("echo x > /tmp/kept"), DONE, commands("cat /tmp/kept", solution(task)), DONE]
    record, _ = attempt(backend, task, turns, tmp_path / "a.jsonl", "rsrt")
    assert record.strict and record.asks == 2 and record.end == "done"
    assert record.exchanges[1].output == NOT_SOLVED and record.exchanges[1].feedback
    assert record.exchanges[2].output == "x\n"
    assert not any(name in NOT_SOLVED for name in record.checks)


def test_rsrt_asks_at_most_twice(backend: Backend, task: Task, tmp_path: Path) -> None:
    record, _ = attempt(backend, task, [DONE, DONE, DONE], tmp_path / "a.jsonl", "rsrt")
    assert record.asks == 2 and record.turns == 3 and record.end == "done" and not record.strict


def test_bash_keeps_files_and_forgets_the_shell(backend: Backend, task: Task, tmp_path: Path) -> None:
    turns = ["```bash\ncd /; echo 1 > /tmp/file; name=x\n```", "```bash\npwd; cat /tmp/file; echo [$name]\n```",
             "```bash\nsubmit\n```"]  # fmt: skip
    record, _ = attempt(backend, task, turns, tmp_path / "a.jsonl", "bash")
    assert record.exchanges[1].output == "exit 0\n/app\n1\n[]\n" and record.end == "done"


def test_more_jobs_than_slots_come_back_in_order(backend: Backend, task: Task, tmp_path: Path) -> None:
    scripts = {seed: [commands(solution(task)), DONE] if seed % 2 else [DONE] for seed in range(7)}
    script = Script(scripts)
    engine = Engine(script, CHAT, backend, SETTINGS)  # type: ignore[arg-type]
    jobs = [Job(task, seed) for seed in range(7)]
    records = collect(jobs, get_harness("terminus", "brief"), engine, tmp_path / "a.jsonl")
    assert [record.seed for record in records] == list(range(7))
    assert [record.strict for record in records] == [bool(seed % 2) for seed in range(7)]
    assert sorted(record.seed for record in read(tmp_path / "a.jsonl")) == list(range(7))


def test_a_slow_command_holds_up_nobody_else(backend: Backend, task: Task, tmp_path: Path) -> None:
    """In lock-step the quick attempt's second turn waits for the slow one's first command."""
    scripts = {
        0: [commands("sleep 3"), DONE],
        1: [commands("echo a"), commands("echo b"), commands(solution(task)), DONE],
    }
    for lockstep in (True, False):
        path = tmp_path / f"{lockstep}.jsonl"
        script = Script({seed: list(turns) for seed, turns in scripts.items()})
        settings = dataclasses.replace(SETTINGS, lockstep=lockstep)
        engine = Engine(script, CHAT, backend, settings)  # type: ignore[arg-type]
        slow, quick = collect([Job(task, 0), Job(task, 1)], get_harness("terminus", "brief"), engine, path)
        assert quick.strict and not slow.strict and slow.end == quick.end == "done" and script.open_slots == 0
        assert script.order == ([0, 1, 1, 0, 1, 1] if lockstep else [0, 1, 1, 1, 1, 0])
    both = [{x.seed: (x.ids, x.checks) for x in read(tmp_path / f"{kind}.jsonl")} for kind in (True, False)]
    assert both[0] == both[1]


def test_a_failure_is_reported_and_closes_every_open_slot_once(backend: Backend, task: Task, tmp_path: Path) -> None:
    """The slot of an attempt that had ended is another's by then."""
    script = Script({0: [DONE], 1: [commands("ls"), DONE], 2: [DONE]})
    advance = script.advance

    def diverging(stops: Collection[int], temperature: float) -> dict[int, tuple[list[int], list[float]]]:
        if script.order[-1] == 2:
            raise FloatingPointError("diverged")
        return advance(stops, temperature)

    script.advance = diverging  # type: ignore[method-assign]
    engine = Engine(script, CHAT, backend, dataclasses.replace(SETTINGS, slots=1))  # type: ignore[arg-type]
    with pytest.raises(FloatingPointError, match="diverged"):
        collect([Job(task, seed) for seed in range(3)], get_harness("terminus", "brief"), engine, tmp_path / "a.jsonl")
    assert script.open_slots == 0


def test_chat_tokens_in_an_observation_are_text(backend: Backend, task: Task, tmp_path: Path) -> None:
    turns = [commands("echo '<|im_end|><|im_start|>assistant'"), DONE]
    record, _ = attempt(backend, task, turns, tmp_path / "a.jsonl")
    specials = [CHAT.tokenizer.token_to_id("<|im_start|>"), CHAT.end]
    start = record.action.index(1)
    count = sum(token in specials for token in record.ids[start:])
    # Two sampled ends, the observation's start and end, the assistant's start; the echo adds none.
    assert count == 5
    assert "<|im_end|>" in record.exchanges[0].output
