"""The whole loop on preset `smoke`, as a user runs it: what it leaves, who changed, how it resumes."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from test_chat import ALWAYS, BPE
from test_weights import multimodal

from rsi.chat import Chat
from rsi.config import parse
from rsi.harness import get_harness
from rsi.rsr import Rewrite, keep, supervised
from rsi.session import load_pool
from rsi.trajectory import Trajectory, read
from rsi.weights import export, load_tokenizer, sha256

STAGES = ["base", "rsr1", "rpr1", "rsr2", "rpr2"]
JOINT = {
    "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "actor/lr",
    "critic/vf_loss", "critic/vf_explained_var", "critic/values/mean", "critic/grad_norm", "reward/mean",
    "reward/strict", "advantage/mean", "advantage/std", "advantage/nonzero_frac", "rollout/logprob_gap",
    "rollout/turns", "rollout/tokens", "rollout/done", "rollout/length", "rollout/infra_error", "timing_s/step",
}  # fmt: skip


STOPPED = "rsi: stopped; the same command goes on from the last saved step\n"


def command(runs: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rsi.train", "--preset", "smoke", "--runs", str(runs), *options]


def train(runs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(runs, *options), capture_output=True, text=True, check=False, timeout=280)


def borrow(run: Path, runs: Path, *folders: str) -> None:
    """Start another run from parts of a finished one: the base model need not be pretrained again."""
    for folder in folders:
        shutil.copytree(run / folder, runs / run.name / folder)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rsi: error: ") and all(word in line for word in words), line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, never interrupted."""
    runs = tmp_path_factory.mktemp("runs")
    begun = time.monotonic()
    done = train(runs)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(f"smoke took {time.monotonic() - begun:.0f} s")
    return runs / "smoke-0"


def stages(run: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((run / "stages.json").read_text())
    return records


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_multimodal_checkpoint_is_trained_and_exported(tmp_path: Path) -> None:
    """A Hugging Face folder of a hybrid that always thinks, from `--init` to what replaces it."""
    original = tmp_path / "original"
    multimodal(original, tied=False)
    BPE.save(str(original / "tokenizer.json"))
    (original / "chat_template.jinja").write_text(ALWAYS)
    options = ["--init", str(original), "--stage", "base", "--rollout.max-length", "1024", "--evaluate.tasks", "1"]
    done = train(tmp_path, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    actor = tmp_path / "smoke-0" / "stages" / "0-base" / "actor"
    asked = BPE.encode("<|im_start|>assistant\n<think>\n").ids
    for record in read(tmp_path / "smoke-0" / "trajectories" / "base" / "evaluation.0.jsonl"):
        first = record.action.index(1)
        assert record.ids[first - len(asked) : first] == asked
    export(actor, tmp_path / "exported", original)
    assert sha256(tmp_path / "exported") == sha256(original)


def test_five_stages_in_the_published_form(run: Path) -> None:
    records = stages(run)
    assert [record["stage"] for record in records] == STAGES
    for record in records:
        evaluation = record["evaluation"]
        assert set(evaluation["suites"]) == {"core", "hard", "long", "swr"}
        for suite in evaluation["suites"].values():
            low, high = suite["ci95"]
            assert 0 <= low <= suite["strict"] <= high <= 1 and suite["strict"] <= suite["process"] <= 1
            assert 0 <= suite["greedy"] <= 1 and suite["trials"] > 0
        rates = [suite["strict"] for suite in evaluation["suites"].values()]
        assert evaluation["mean"] == pytest.approx(sum(rates) / 4)
        assert (evaluation["difference"] is None) == (record["stage"] == "base")
        assert ("funnel" in record) == record["stage"].startswith("rsr") and record["seconds"] > 0
    by_name = {record["stage"]: record for record in records}
    for name, before in zip(STAGES[1:], STAGES, strict=False):
        means = [by_name[stage]["evaluation"]["mean"] for stage in (name, before)]
        assert by_name[name]["evaluation"]["difference"] == pytest.approx(means[0] - means[1])
    assert (run / "stages.svg").read_text().startswith("<svg")
    assert (run / "log.txt").stat().st_size and json.loads((run / "config.json").read_text())["commit"]


def test_who_changed_and_who_did_not(run: Path) -> None:
    actors = [record["actor_sha256"] for record in stages(run)]
    assert len(set(actors)) == len(actors), "every stage trains the actor"
    base, rsr1, rpr1, rsr2, rpr2 = (record["critic_sha256"] for record in stages(run))
    assert base is None and rsr1 is None and rpr1 and rpr2 and rpr2 != rpr1
    assert rsr2 == rpr1
    passed = [run / "stages" / folder / "critic" for folder in ("2-rpr1", "3-rsr2")]
    names = [sorted(path.name for path in folder.iterdir()) for folder in passed]
    assert names[0] == names[1]
    assert all((passed[0] / name).read_bytes() == (passed[1] / name).read_bytes() for name in names[0])


def test_metrics_have_their_names_and_the_actor_is_frozen_when_it_should_be(run: Path) -> None:
    steps = metrics(run)
    phases = {(step["stage"], step["phase"]) for step in steps}
    assert {("rpr1", "warmup"), ("rpr1", "calibration"), ("rpr1", "joint"), ("rsr1", "train")} <= phases
    assert ("rpr2", "warmup") not in phases and ("rpr2", "calibration") in phases
    for step in steps:
        if step["phase"] == "joint":
            assert set(step) >= JOINT
            assert step["rollout/logprob_gap"] < 1e-4
        elif step["phase"] in ("warmup", "calibration"):
            assert "actor/grad_norm" not in step and step["critic/grad_norm"] > 0


def test_the_critic_explains_returns_and_inheritance_beats_a_fresh_one(run: Path) -> None:
    steps = metrics(run)
    for stage in ("rpr1", "rpr2"):
        first = next(step for step in steps if step["stage"] == stage and step["phase"] == "joint")
        assert first["critic/vf_explained_var"] > 0
    first = next(step for step in steps if step["stage"] == "rpr2" and step["phase"] == "calibration")
    assert first["critic/vf_explained_var"] > first["critic/fresh_vf_explained_var"]


def test_the_funnel_narrows_and_its_files_agree(run: Path) -> None:
    for name, number in (("rsr1", 1), ("rsr2", 3)):
        funnel = next(record["funnel"] for record in stages(run) if record["stage"] == name)
        assert funnel["attempts"] == 3 * funnel["tasks"] and funnel["kept"] > 0
        assert max(funnel["tasks_solved"].values()) <= funnel["tasks_solved_by_any"] <= funnel["tasks"]
        assert funnel["approved"] <= funnel["runbooks"] and funnel["verified"] <= funnel["executed"]
        assert funnel["kept"] + funnel["strayed"] + sum(funnel["screened_out"].values()) <= funnel["verified"]
        kept = list(read(run / "stages" / f"{number}-{name}" / "kept.jsonl"))
        assert len(kept) == funnel["kept"] and all(record.strict and record.runbook for record in kept)
        harnesses = {path.name.split(".")[0] for path in (run / "trajectories" / name).glob("discovery-*.jsonl")}
        assert harnesses == {"discovery-terminus", "discovery-bash", "discovery-rsrt"}


def test_every_recorded_attempt_is_its_prompt_turns_and_observations(run: Path) -> None:
    chat = Chat(load_tokenizer(run / "stages" / "0-base" / "actor"))
    tasks = {task.name: task for pool in (load_pool(run / "tasks" / "train"), load_pool(run / "tasks" / "eval"))
             for of in pool.values() for task in of}  # fmt: skip
    seen = 0
    for path in sorted((run / "trajectories").rglob("*.jsonl")):
        for record in read(path):
            harness = get_harness(record.harness, "brief")
            ids = chat.prompt(harness.prompt(tasks[record.task].instruction, record.runbook))
            assert record.ids[: len(ids)] == ids and not any(record.action[: len(ids)])
            for number, exchange in enumerate(record.exchanges):
                sampled = record.said(number)
                assert record.ids[len(ids) : len(ids) + len(sampled)] == sampled
                ids += sampled
                if number < record.turns - 1:
                    ids += chat.observation(exchange.output)
            assert record.ids == ids, (path, record.task)
            seen += 1
    assert seen > 300


def test_a_supervised_example_has_the_bare_prompt_and_the_same_turns(run: Path) -> None:
    chat = Chat(load_tokenizer(run / "stages" / "0-base" / "actor"))
    tasks = {task.name: task for of in load_pool(run / "tasks" / "train").values() for task in of}
    harness = get_harness("terminus", "brief")
    for record in read(run / "stages" / "1-rsr1" / "kept.jsonl"):
        prompt = chat.prompt(harness.prompt(tasks[record.task].instruction))
        example = supervised(record, prompt)
        start = record.action.index(1)
        assert example.ids == prompt + record.ids[start:] and example.logprob == [] and example.runbook is None
        assert example.action == [0] * len(prompt) + record.action[start:]
        assert len(example.ids) == len(example.turn) and len(prompt) < start


def keep_one(run: Path, record: Trajectory, turns: int, *options: str) -> tuple[int, dict[str, Any]]:
    """What `keep` makes of one attempt whose runbook was written from a success of `turns` turns."""
    chat = Chat(load_tokenizer(run / "stages" / "0-base" / "actor"))
    task = next(task for of in load_pool(run / "tasks" / "train").values() for task in of if task.name == record.task)
    session: Any = SimpleNamespace(config=parse(["--preset", "smoke", *options]))
    funnel = dict[str, Any]()
    kept = keep(session, [record], [Rewrite(task, record.runbook or "", turns)], chat, funnel)
    assert kept in ([], [record])
    return len(kept), funnel


def test_what_a_turn_says_is_screened_as_what_it_runs(run: Path) -> None:
    """A thought of the runbook would be taught to an actor that is given none."""
    chat = Chat(load_tokenizer(run / "stages" / "0-base" / "actor"))
    record = next(read(run / "stages" / "1-rsr1" / "kept.jsonl"))
    kept, funnel = keep_one(run, record, record.turns)
    assert kept == 1 and funnel["screened_out"] == {}
    thought, start = chat.encode_turn("<think>As the runbook says.</think>")[:-1], record.action.index(1)
    for of, added in ((record.ids, thought), (record.action, [1] * len(thought)), (record.turn, [0] * len(thought))):
        of[start:start] = added
    kept, funnel = keep_one(run, record, record.turns)
    assert kept == 0 and funnel["screened_out"] == {"runbook": 1}


def test_what_strays_is_not_kept(run: Path) -> None:
    """Longer than the success that its runbook comes from, or never said to be done: the verifier passes both."""
    record = next(read(run / "stages" / "1-rsr1" / "kept.jsonl"))
    turns, endless = record.turns, dataclasses.replace(record, end="turns")

    def found(*arguments: Any) -> tuple[int, int]:
        kept, funnel = keep_one(run, *arguments)
        return kept, funnel["strayed"]

    assert turns > 1 and found(record, turns) == found(record, turns + 1) == (1, 0)
    assert found(record, turns - 1) == found(endless, turns) == (0, 1)
    assert found(record, 1, "--rsr.detour", "inf") == found(record, 1, "--rsr.detour", str(turns)) == (1, 0)


def test_killed_at_random_moments_it_ends_the_same(run: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "bench" / "kill.py"
    options = ["--kills", "5", "--runs", str(tmp_path), "--reference", str(run)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 5 and found["different"] == {} and found["processes_left"] == 0


def test_a_stop_is_asked_for_once_and_saves(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    process = subprocess.Popen(command(tmp_path, "--stage", "rpr1"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("rpr1 calibration 1"):
            break
    process.stdout.close()  # as of a `| tee`, which the same Ctrl-C ends
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    said = (tmp_path / "smoke-0" / "log.txt").read_text()
    assert "stopped as asked" in said and "joint 1" not in said
    saved = json.loads((tmp_path / "smoke-0" / "stages" / "2-rpr1.partial" / "state" / "progress.json").read_text())
    assert saved["position"] >= 5
    assert train(tmp_path, "--stage", "rpr1").returncode == 0
    assert stages(tmp_path / "smoke-0")[2] | {"seconds": 0} == stages(run)[2] | {"seconds": 0}


def test_asked_twice_it_stops_at_once(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    process = subprocess.Popen(
        command(tmp_path, "--stage", "rpr1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("rpr1 calibration 1"):
            break
    process.send_signal(signal.SIGINT)
    assert "Ctrl-C once more stops now" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    said, complained = process.communicate()
    assert process.returncode == 130 and complained == STOPPED and "calibration 3" not in said
    assert train(tmp_path, "--stage", "rpr1").returncode == 0
    assert stages(tmp_path / "smoke-0")[2] | {"seconds": 0} == stages(run)[2] | {"seconds": 0}


def running(*words: str) -> list[int]:
    """Processes with this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == "".join(f"{word}\0" for word in words).encode():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_to_stop_now_it_waits_for_no_verifier(run: Path, tmp_path: Path, number: signal.Signals) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    for script in (tmp_path / run.name / "tasks" / "train" / "swr").glob("*/tests/test.sh"):
        script.write_text(f"sleep 50.{os.getpid()}\n{script.read_text()}")
    process = subprocess.Popen(command(tmp_path, "--stage", "rpr1"), stderr=subprocess.PIPE, text=True)
    while not running("sleep", f"50.{os.getpid()}"):
        assert process.poll() is None
        time.sleep(0.05)
    begun = time.monotonic()
    if number == signal.SIGINT:  # the second is sent when the first was heard: two that are pending are one
        process.send_signal(number)
        assert process.stderr is not None and "Ctrl-C once more stops now" in process.stderr.readline()
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 130 and said.endswith(STOPPED) and time.monotonic() - begun < 25
    assert not running("sleep", f"50.{os.getpid()}")


def test_sandboxes_that_die_end_the_run_and_their_attempts_are_made_again(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base")
    process = subprocess.Popen(command(tmp_path, "--stage", "rsr1"), stdout=subprocess.PIPE, text=True)
    attempts = tmp_path / "smoke-0" / "trajectories" / "rsr1" / "discovery-terminus.0.jsonl"
    while not (attempts.exists() and attempts.stat().st_size):
        assert process.poll() is None
        time.sleep(0.005)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text() == "init\n":
            os.kill(int(child), signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode == 1
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert "attempts failed for the machine's reasons, more than 25%" in line and "the same command goes on" in line
    assert train(tmp_path, "--stage", "rsr1").returncode == 0
    assert stages(tmp_path / "smoke-0")[1] | {"seconds": 0} == stages(run)[1] | {"seconds": 0}


def test_rsr_never_reads_a_solution(run: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(run / "tasks", tasks, ignore=shutil.ignore_patterns("solution"))
    assert not list(tasks.rglob("solve.sh"))
    borrow(run, tmp_path, "stages/0-base")
    done = train(tmp_path, "--tasks", str(tasks), "--stage", "rsr1")
    assert done.returncode == 0, done.stderr[-3000:]
    for bare, full in zip(stages(tmp_path / "smoke-0"), stages(run), strict=False):
        assert bare["actor_sha256"] == full["actor_sha256"] and bare.get("funnel") == full.get("funnel")


def test_a_folder_of_another_configuration_is_refused_with_the_keys(run: Path) -> None:
    done = train(run.parent, "--name", run.name, "--rpr.gamma", "0.5", "--seed", "3")
    refused(done, "rpr.gamma (0.99 → 0.5)", "seed (0 → 3)")
    assert stages(run)


def test_a_finished_run_only_shows_its_table(run: Path) -> None:
    before = (run / "stages.json").read_bytes()
    done = train(run.parent)
    assert done.returncode == 0 and "rpr2" in done.stdout
    assert (run / "stages.json").read_bytes() == before


def test_a_critic_without_its_head_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / run.name)
    shutil.rmtree(tmp_path / run.name / "stages" / "4-rpr2")
    file = tmp_path / run.name / "stages" / "3-rsr2" / "critic" / "model.safetensors"
    tensors = {name: tensor for name, tensor in safetensors.torch.load_file(file).items() if "value_head" not in name}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    refused(train(tmp_path), "value_head", "critic")


def test_a_malformed_task_names_file_and_field(run: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(run / "tasks", tasks)
    broken = next(tasks.rglob("train/hard/*/task.toml"))
    broken.write_text(broken.read_text().replace("timeout_sec = 60.0", 'timeout_sec = "soon"'))
    for dry in ([], ["--dry-run"]):
        refused(train(tmp_path, "--tasks", str(tasks), *dry), str(broken), "timeout_sec", "soon")
    shutil.rmtree(broken.parent)
    shutil.rmtree(tasks / "eval" / "swr")
    for dry in ([], ["--dry-run"]):
        refused(train(tmp_path, "--tasks", str(tasks), *dry), "eval/swr")
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]


def test_without_a_daemon_docker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    refused(train(tmp_path, "--sandbox", "docker"), "daemon")
    assert not list(tmp_path.iterdir())


def test_published_tasks_are_measured_once_a_stage(run: Path, tmp_path: Path) -> None:
    def measure(tasks: int) -> subprocess.CompletedProcess[str]:
        evaluate = [sys.executable, "-m", "rsi.evaluate", ".", "--tasks", str(tasks)]
        return subprocess.run(evaluate, cwd=folder, capture_output=True, text=True, check=False)

    folder = tmp_path / run.name
    shutil.copytree(run, folder)
    last = folder / "stages" / "4-rpr2"
    last.rename(tmp_path / "rpr2")
    assert measure(1).returncode == 0
    before = json.loads((folder / "published.json").read_text())
    (tmp_path / "rpr2").rename(last)
    done = measure(1)
    assert done.returncode == 0 and "rpr2 measured" in done.stdout and "rsr1 measured" not in done.stdout
    after = json.loads((folder / "published.json").read_text())
    assert list(before) == STAGES[:4] and list(after) == STAGES and before.items() <= after.items()
    refused(measure(2), "holds 1 tasks a suite, not 2")
    refused(measure(0), "--tasks 0", "at least 1")
    (folder / "published.json").write_text("{")
    refused(measure(1), "published.json cannot be read")
    (folder / "published.json").write_text(json.dumps(before))
    weights = last / "actor" / "model.safetensors"
    diverged = {name: tensor * torch.nan for name, tensor in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(diverged, weights, {"format": "pt"})
    done = measure(1)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "the model's logits are not finite" in line and "the same command goes on" in line


def test_zero_advantages_move_no_weight(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    done = train(tmp_path, "--rpr.control", "zero_advantages", "--stage", "rpr1")
    assert done.returncode == 0, done.stderr[-3000:]
    _, rsr1, rpr1 = stages(tmp_path / run.name)
    assert rpr1["actor_sha256"] == rsr1["actor_sha256"] and rpr1["evaluation"]["difference"] == 0
    outcomes = [
        (tmp_path / run.name / "stages" / stage / "evaluation.json").read_bytes() for stage in ("1-rsr1", "2-rpr1")
    ]
    assert outcomes[0] == outcomes[1]
    assert done.stdout.count("warning: 5 steps in a row moved nothing") == 1


def test_what_is_not_finite_is_skipped_kept_and_ends_the_run(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    done = train(tmp_path, "--rpr.critic-lr", "1e13", "--stage", "rpr1")
    folder = tmp_path / run.name
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.count("the gradient was not finite: the step is skipped") == 1
    (line,) = [line for line in done.stdout.splitlines() if "error" in line]
    assert "values or log-probs of rpr1 warmup step 2 are not finite" in line and "the same command goes on" in line
    assert [step["critic/grad_norm"] for step in metrics(folder)] == [None]
    kept = sorted((folder / "failed").iterdir())
    assert [path.name for path in kept] == ["rpr1-warmup-1.jsonl", "rpr1-warmup-2.jsonl"]
    assert all(len(list(read(path))) == 8 for path in kept)


def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(run: Path, tmp_path: Path) -> None:
    borrow(run, tmp_path, "tasks", "stages/0-base", "stages/1-rsr1")
    done = train(tmp_path, "--rpr.max-logprob-gap", "1e-12", "--stage", "rpr1")
    (line,) = [line for line in done.stdout.splitlines() if "error" in line]
    assert (
        done.returncode == 1
        and "more than --rpr.max-logprob-gap 1e-12" in line
        and len(metrics(tmp_path / run.name)) == 1
    )


def test_the_checkpoint_loads_in_transformers(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "stages" / "4-rpr2" / "actor"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    record = next(read(run / "trajectories" / "rpr2" / "evaluation.0.jsonl"))
    with torch.no_grad():
        logprobs = model(torch.tensor([record.ids])).logits[0, :-1].log_softmax(-1)
    for position, action in enumerate(record.action):
        if action:
            expected = logprobs[position - 1, record.ids[position]].item()
            assert record.logprob[position] == pytest.approx(expected, abs=1e-3)
    assert tokenizer.convert_ids_to_tokens(record.ids[-1]) == "<|im_end|>" or record.end == "length"
