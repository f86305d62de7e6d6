"""Harbor's format in full and Terminal-Bench 1's: what is read, what runs, what is refused and why."""

import json
from pathlib import Path

import pytest
import yaml
from rsi_sandbox import Backend, SandboxError, TaskError, load_task, verify
from rsi_sandbox.__main__ import main
from rsi_sandbox.legacy import parse_yaml
from rsi_sandbox.toolchain import IMAGE
from rsi_sandbox.trial import new_trial, run_trial
from sandbox_tasks import need_toolchain, open_or_skip, write_task

FULL = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", {source = "/data", destination = "data", exclude = ["*.log", "cache/*"]}]
future = 1
[task]
name = "org/name"
version = "2"
authors = [{name = "A", email = "a@b"}]
colour = "blue"
[metadata]
difficulty = "hard"
anything = [1, 2]
[agent]
timeout_sec = 33
user = "nobody"
[verifier]
timeout_sec = 44.5
environment_mode = "separate"
env = {TOKEN = "${RSI_TEST_TOKEN:-none}", N = 3}
[environment]
build_timeout_sec = 120
cpus = 2
memory = "3G"
storage = "10G"
gpus = 0
os = "linux"
allow_internet = false
env = {A = "b"}
workdir = "/data"
skills_dir = "/skills"
[environment.healthcheck]
command = "true"
retries = 5
[solution.env]
HINT = "x"
"""


def test_every_field_of_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_TEST_TOKEN", "secret")
    task = load_task(write_task(tmp_path / "full", **{"task.toml": FULL}))
    assert (task.name, task.agent_timeout, task.verifier_timeout, task.build_timeout) == ("org/name", 33, 44.5, 120)
    assert (task.workdir, task.memory_mb, task.cpus, task.network) == ("/data", 3072, 2, False)
    assert task.artifacts == ("/app/out", "/data") and task.excluded == ("/data/*.log", "/data/cache/*")
    assert (task.agent_user, task.verifier_user, task.mode) == ("nobody", "", "artifacts")
    assert dict(task.verifier_variables) == {"TOKEN": "secret", "N": "3"} and ("A", "b") in task.variables
    assert dict(task.solution_variables) == {"HINT": "x"} and task.healthcheck and task.healthcheck.retries == 5
    assert "agent.user" in task.docker_only
    named = " ".join(task.notes)
    unread = ("future", "task.colour", "environment.skills_dir", "environment.storage", "artifacts[1].destination")
    assert all(key in named for key in unread)
    assert not any(key in named for key in ("difficulty", "authors", "source", "gpus"))


MISTAKES = [
    ("[environment]\nmemory = 'lots'", "environment.memory: 'lots' is not a size"),
    ("[environment]\nnetwork_mode = 'allowlist'", "environment.network_mode: 'allowlist' cannot be enforced"),
    ("[environment]\nos = 'windows'", "environment.os: 'windows' is not supported"),
    ("[environment]\ngpus = 2", "environment.gpus: 2 cannot be given"),
    ("[environment]\nworkdir = 'app'", "environment.workdir: 'app' is not a directory"),
    ("[environment]\nallow_internet = 'no'", "environment.allow_internet: 'no' is not true or false"),
    ("[environment]\ncpus = -1", "environment.cpus: -1"),
    ("[environment.healthcheck]\nretries = 1", "environment.healthcheck.command: '' is empty"),
    ("[environment.env]\nA = '${RSI_TEST_NOT_SET}'", "environment.env.A: '${RSI_TEST_NOT_SET}' is not set here"),
    ("[verifier]\nenvironment_mode = 'both'", "verifier.environment_mode: 'both' is unknown; use 'shared' or"),
    ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "contradicts its own environment"),
    ("[agent]\nuser = 'a b'", "agent.user: 'a b' is not a user"),
    ("[environment]\nmemory_mb = 0.5", "environment.memory_mb: 0.5 is not a whole number above 0"),
    ("[environment.env]\n'A B' = 'x'", "environment.env: 'A B' is not a variable's name"),
    ('[verifier.env]\nA = "\\u0000"', "verifier.env.A: '\\x00' is not text"),
    ("artifacts = [{source = '/x', service = 'db'}]", "artifacts[0].service: 'db' is another service"),
    ("artifacts = [{source = '/x', exclude = '*.log'}]", "artifacts[0].exclude: '*.log' is not a list"),
    ("artifacts = [3]", "artifacts[0].source: 3 is not text"),
    ("[[steps]]\nname = 'nothing'", "steps[0].name: 'nothing' names no folder"),
    ("multi_step_reward_strategy = 'max'", "multi_step_reward_strategy: 'max' is unknown"),
]


@pytest.mark.parametrize(("toml", "message"), MISTAKES)
def test_mistakes_name_file_field_value_and_remedy(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(write_task(tmp_path / "task", **{"task.toml": toml}))
    assert message in str(caught.value) and "task.toml: " in str(caught.value) and "; " in str(caught.value)


def test_canary_lines_and_windows_line_ends(backend: Backend, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "instruction.md").write_text("<!-- BENCHMARK canary GUID 1 -->\n# canary\n\n# Title\r\nDo it.\n")
    script = "[[ $(<out.txt) == apple* ]] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    (folder / "tests/test.sh").write_bytes(script.replace("\n", "\r\n").encode())
    task = load_task(folder)
    (folder / "instruction.md").write_text("\ufeff" + (folder / "instruction.md").read_text())
    assert (
        load_task(folder).instruction == task.instruction == "# Title\nDo it." and "Windows line ends" in task.notes[0]
    )
    sandbox = backend.start(task)
    sandbox.run("sort words.txt > out.txt")
    assert verify(backend, task, sandbox).strict


def test_tests_that_move_their_own_folder(backend: Backend, tmp_path: Path) -> None:
    script = "mv /tests /elsewhere && [[ -e /elsewhere/data ]] && echo 1 > /logs/verifier/reward.txt"
    task = load_task(write_task(tmp_path / "task", script, **{"tests/data": "x"}))
    assert verify(backend, task, backend.start(task)).strict


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ('{"reward": 1, "style": 0.5}', (1.0, False)),
        ('{"a": 1, "b": 1.0, "c": true}', (1.0, True)),
        ('{"a": 1, "b": 0}', (0.5, False)),
        ("{}", None),
        ('{"a": "1"}', None),
        ('{"a": NaN}', None),
        ("[1]", None),
        ('{"a": {"b": 1}}', None),
        ("[" * 100_000, None),
    ],
)
def test_several_rewards(backend: Backend, tmp_path: Path, rewards: str, expected: tuple[float, bool] | None) -> None:
    script = f"echo 0 > /logs/verifier/reward.txt; cat > /logs/verifier/reward.json <<'END'\n{rewards}\nEND\n"
    task = load_task(write_task(tmp_path / "task", script))
    if expected is None:
        with pytest.raises(SandboxError, match=r"reward\.json"):
            verify(backend, task, backend.start(task))
    else:
        verdict = verify(backend, task, backend.start(task))
        assert (verdict.reward, verdict.strict) == expected and verdict.rewards == json.loads(rewards)


def test_reward_and_report_are_compared(backend: Backend, tmp_path: Path) -> None:
    report = '{"results":{"tests":[{"name":"a","status":"passed"},{"name":"b","status":"failed"}]}}'
    script = f"echo 1 > /logs/verifier/reward.txt; echo '{report}' > /logs/verifier/ctrf.json"
    task = load_task(write_task(tmp_path / "task", script))
    verdict = verify(backend, task, backend.start(task))
    assert not verdict.strict and verdict.note == "reward 1, but b failed"
    script = 'echo 1 > /logs/verifier/reward.txt; echo \'{"results":{"tests":[]}}\' > /logs/verifier/ctrf.json'
    task = load_task(write_task(tmp_path / "empty", script))
    with pytest.raises(SandboxError, match="names no test"):
        verify(backend, task, backend.start(task))


def test_excluded_artifacts_stay_behind(backend: Backend, tmp_path: Path) -> None:
    toml = 'artifacts = [{source = "/app", exclude = ["*.log", "cache/*"]}]\n'
    script = "[[ -e /app/a && ! -e /app/b.log && ! -e /app/cache/c ]] && echo 1 > /logs/verifier/reward.txt"
    task = load_task(write_task(tmp_path / "task", script, **{"task.toml": toml}))
    sandbox = backend.start(task)
    sandbox.run("mkdir cache; touch a b.log cache/c")
    assert verify(backend, task, sandbox).strict


def test_tests_that_cannot_begin_are_an_error(backend: Backend, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "task", "uvx pytest /tests\necho 0 > /logs/verifier/reward.txt\n"))
    with pytest.raises(SandboxError, match="uvx: command not found"):
        verify(backend, task, backend.start(task))


def test_health_check_comes_first(backend: Backend, tmp_path: Path) -> None:
    check = "\n[environment.healthcheck]\ninterval_sec = 0.1\nretries = 2\ncommand = "
    folder = write_task(tmp_path / "task", **{"task.toml": check + "'[[ -e words.txt ]] && echo hi > healthy'\n"})
    with backend.start(load_task(folder)) as sandbox:
        assert sandbox.run("cat healthy").output == "hi\n"
    (folder / "task.toml").write_text(check + "'echo sick; false'\n")
    with pytest.raises(SandboxError, match=r"failed 2 times.*sick"):
        backend.start(load_task(folder))


def steps_task(folder: Path, toml: str = "") -> Path:
    write_task(folder, "", **{"task.toml": 'schema_version = "1.4"\n' + toml})
    (folder / "instruction.md").unlink()
    (folder / "tests/test.sh").unlink()
    (folder / "tests/shared").write_text("x")
    for number, name in enumerate(("first", "second")):
        files = {
            "instruction.md": f"Write {name}.\n",
            "tests/test.sh": f"[[ -e {name} && -e /tests/shared && -e given{number} ]] && r=1 || r=0\n"
            "echo $r > /logs/verifier/reward.txt\n",
            "workdir/given" + str(number): "",
            "solution/solve.sh": f"touch {name}\n",
        }
        for path, text in files.items():
            target = folder / "steps" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


def test_steps_follow_each_other_in_one_sandbox(backend: Backend, tmp_path: Path) -> None:
    toml = "[[steps]]\nname = 'first'\nmin_reward = 1\n[[steps]]\nname = 'second'\n"
    task = load_task(steps_task(tmp_path / "task", toml))
    assert [step.instruction for step in task.steps] == ["Write first.", "Write second."]
    oracle = run_trial(backend, new_trial(task, "oracle"), tmp_path / "out")
    assert oracle.outcome == "passed" and len(oracle.steps) == 2, oracle.error
    half = run_trial(backend, new_trial(task, "touch first"))
    assert half.verdict and half.verdict.reward == 0.5 and half.outcome == "failed"
    idle = run_trial(backend, new_trial(task, "nop"))
    assert idle.verdict and idle.verdict.reward == 0 and len(idle.steps) == 1, "the second step is skipped"
    result = json.loads((tmp_path / "out" / oracle.name / "result.json").read_text())
    assert result["step_results"][1] == {"step_name": "second", "verifier_result": {"rewards": {"reward": 1.0}}}
    assert idle.verdict.checks == {} and idle.steps[0][0] == "first"
    final = load_task(steps_task(tmp_path / "final", "multi_step_reward_strategy = 'final'\n" + toml.replace("1", "0")))
    other = run_trial(backend, new_trial(final, "touch second"))
    assert other.outcome == "passed" and other.verdict and other.verdict.reward == 1


def test_files_of_a_step_and_of_its_solution_keep_their_modes(backend: Backend, tmp_path: Path) -> None:
    folder = steps_task(tmp_path / "task", "[[steps]]\nname = 'first'\n")
    for path, text in {
        "workdir/given0": "touch first",
        "solution/tool": "cp given0 first",
        "solution/solve.sh": "",
    }.items():
        target = folder / "steps/first" / path
        target.write_text(f"#!/bin/bash\n{text or '/solution/tool'}\n")
        target.chmod(0o755)
    for agent in ("./given0", "oracle"):
        trial = run_trial(backend, new_trial(load_task(folder), agent))
        assert trial.outcome == "passed", (agent, trial.error, trial.commands)


@pytest.mark.docker
@pytest.mark.parametrize(("user", "expected"), [("nobody", "65534:65534"), ("1234", "1234:0"), ("7:games", "7:60")])
def test_tests_run_as_the_user_that_the_task_names(daemon: Backend, tmp_path: Path, user: str, expected: str) -> None:
    test = f"[[ $(id -u):$(id -g) == {expected} && $(id -G) == $(id -g) ]] && echo 1 > /logs/verifier/reward.txt\n"
    for number, kind in enumerate(("[verifier]", "[verifier]\nenvironment_mode = 'shared'")):  # the last: a snapshot
        toml = {"task.toml": f"{kind}\nuser = '{user}'\n"}
        trial = run_trial(daemon, new_trial(load_task(write_task(tmp_path / str(number), test, **toml)), "nop"))
        assert trial.outcome == "passed", trial.error


@pytest.mark.docker
def test_what_only_docker_can_do_holds_in_steps(daemon: Backend, tmp_path: Path) -> None:
    folder = steps_task(tmp_path / "task", "[verifier]\nuser = 'nobody'\n[[steps]]\nname = 'first'\n")
    test = folder / "steps/first/tests/test.sh"
    test.write_text("[[ $(id -un) == nobody ]] && echo 1 > /logs/verifier/reward.txt\n")
    assert run_trial(daemon, new_trial(load_task(folder), "nop")).outcome == "passed"
    (folder / "task.toml").write_text("[[steps]]\nname = 'first'\n")
    test.write_text("echo $(( $(ls /tmp | grep -c left) )) > /logs/verifier/reward.txt\n")
    arguments = [
        "run",
        str(folder),
        "--sandbox",
        "docker",
        "--out",
        str(tmp_path / "jobs"),
        "--agent",
        "touch /tmp/left",
    ]
    assert main(arguments) == 1, "what lies outside the artifacts is not judged"
    assert main([*arguments, "--verifier", "snapshot"]) == 0


def test_a_steps_own_health_check_and_set_up_come_first(backend: Backend, tmp_path: Path) -> None:
    toml = (
        "[[steps]]\nname='first'\n[[steps]]\nname='second'\n[steps.healthcheck]\ninterval_sec=0.1\nretries=2\ncommand="
    )
    folder = steps_task(tmp_path / "task", toml + "'echo sick; [[ -e made && -e first ]]'\n")
    (folder / "steps/second/workdir/setup.sh").write_text("touch made\n")
    assert run_trial(backend, new_trial(load_task(folder), "oracle")).outcome == "passed"
    sick = run_trial(backend, new_trial(load_task(folder), "nop"))
    assert sick.outcome == "infra_error" and "failed 2 times: 'sick" in sick.error and len(sick.steps) == 1
    (folder / "steps/second/workdir/setup.sh").write_text("echo broken; exit 3\n")
    broken = run_trial(backend, new_trial(load_task(folder), "oracle"))
    assert broken.outcome == "infra_error" and "step second: setup.sh failed: 3: 'broken" in broken.error
    (folder / "task.toml").write_text("[[steps]]\nname='first'\n[[steps]]\nname='First'\n")
    (folder / "steps/second").rename(folder / "steps/First")
    with pytest.raises(TaskError, match=r"steps: \['first'\] are names of several"):
        load_task(folder)


YAML = """\
# canary
instruction: |-
  Do this: now.

    indented # no comment
author_name: "A: b"   # comment
tags:
- x
- y z
other: [a, "b c", 3]
max_agent_timeout_sec: 360.5
folded: >
  one
  two

  three
n: null
services:
  client:
    environment:
      - A=1
      - "B=2 3"
    deep:
      - name: a
        v: 2
      - name: b
plain: goes
  on here
flag: false
q: 'it''s'
"""


def test_yaml_subset_reads_as_yaml_does(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(YAML)
    assert parse_yaml(tmp_path / "t.yaml") == yaml.safe_load(YAML)
    for bad in ("a: &x 1", "just text", "a: 1\n- b", "{a: 1}"):
        (tmp_path / "t.yaml").write_text(bad)
        with pytest.raises(TaskError, match=r"t\.yaml: line \d"):
            parse_yaml(tmp_path / "t.yaml")


def legacy_task(folder: Path, run: str, **files: str) -> Path:
    contents = {
        "task.yaml": "instruction: |\n  Write hello to out.txt.\ndifficulty: easy\nparser_name: pytest\n"
        "max_test_timeout_sec: 60\nodd_key: 1\n",
        "Dockerfile": "FROM debian:bookworm\nWORKDIR /app\nRUN echo made > made.txt\n",
        "docker-compose.yaml": "services:\n  client:\n    build: .\n    environment:\n      - A=1\n",
        "run-tests.sh": run,
        "tests/test_outputs.py": "from pathlib import Path\n\ndef test_out():\n"
        "    assert Path('/app/out.txt').read_text() == 'hello\\n'\n",
        "solution.sh": "echo hello > out.txt\n",
    } | files
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


FETCH = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
"""
RUNS = {
    "uv project": "uv init\nuv add pytest==8.4.1\nuv run pytest $TEST_DIR/test_outputs.py -rA\n",
    "uvx": "uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json "
    "$TEST_DIR/test_outputs.py -rA\n",
    "pip": "pip install pytest\npytest $TEST_DIR -rA\n",
}


@pytest.fixture(scope="module")
def daemon():
    with open_or_skip("docker") as backend:
        need_toolchain(IMAGE)
        yield backend


@pytest.mark.docker
@pytest.mark.parametrize("run", RUNS)
def test_legacy_tasks_run_offline(daemon: Backend, tmp_path: Path, run: str) -> None:
    task = load_task(legacy_task(tmp_path / "old-task", FETCH + RUNS[run]))
    assert (task.mode, task.agent_timeout, task.name) == ("snapshot", 360, "old-task")
    assert task.notes == ("task.yaml: odd_key: not read",) and ("A", "1") in task.variables
    oracle = run_trial(daemon, new_trial(task, "oracle"))
    assert oracle.outcome == "passed" and oracle.verdict, (oracle.error, oracle.verdict)
    assert oracle.verdict.checks == {"test_outputs.py::test_out": True}
    with daemon.start(task) as sandbox:
        assert sandbox.run("ls -A; cat made.txt; ls /tests /solution").output.startswith("made.txt\nmade\n")
    idle = run_trial(daemon, new_trial(task, "nop"))
    assert idle.outcome == "failed" and idle.verdict and not idle.verdict.checks["test_outputs.py::test_out"]


def test_legacy_mistakes(tmp_path: Path) -> None:
    folder = legacy_task(tmp_path / "task", "pytest")
    for name, text, message in (
        ("task.yaml", "instruction: x\nparser_name: mlebench\n", "parser_name: 'mlebench' reads a screen"),
        ("task.yaml", "instruction: x\nrun_tests_in_same_shell: true\n", "run_tests_in_same_shell"),
        ("task.yaml", "difficulty: easy\n", "instruction: '' is empty"),
        ("docker-compose.yaml", "services:\n  client:\n    privileged: true\n", "'privileged'"),
        ("docker-compose.yaml", "services:\n  client:\n    build: .\n  db:\n    image: x\n", "only one is supported"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(TaskError, match=message):
            load_task(folder)
        (folder / name).write_text(before)


@pytest.mark.docker
def test_agent_and_verifier_users_and_a_verifier_image_of_its_own(daemon: Backend, tmp_path: Path) -> None:
    toml = "[agent]\nuser = 'nobody'\n[environment]\nworkdir = '/tmp'\n"
    test = "[[ $(id -u) == 0 && $(stat -c %U /tmp/mine) == root && -e /baked ]] && echo 1 > /logs/verifier/reward.txt"
    dockerfile = "FROM debian:bookworm\nCOPY . /tests/\nRUN touch /baked\n"
    task = load_task(write_task(tmp_path / "task", test, **{"task.toml": toml, "tests/Dockerfile": dockerfile}))
    sandbox = daemon.start(task)
    assert sandbox.run("id -un; touch /tmp/mine; touch /root/x").output.startswith("nobody\n")
    assert sandbox.run("sleep 100", timeout=0.3).limit == "timeout" and sandbox.run("echo ok").output == "ok\n"
    assert verify(daemon, task, sandbox).strict


@pytest.mark.docker
def test_a_failed_build_and_an_unknown_base_are_errors(daemon: Backend, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", **{"environment/Dockerfile": "FROM debian:bookworm\nRUN false\n"})
    assert run_trial(daemon, new_trial(load_task(folder), "nop")).outcome == "infra_error"
    (folder / "environment/Dockerfile").write_text("FROM no-such-image:1\n")
    trial = run_trial(daemon, new_trial(load_task(folder), "nop"))
    assert trial.outcome == "infra_error" and "--base no-such-image:1=LOCAL" in trial.error


def test_run_command_writes_harbors_layout(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_task(tmp_path / "sort-words")
    arguments = ["run", str(folder), "--sandbox", backend.kind, "--out", str(tmp_path / "jobs"), "--agent"]
    assert main([*arguments, "sort words.txt > out.txt; echo done"]) == 0
    assert "1 of 1 passed" in capsys.readouterr().out
    (job,) = (tmp_path / "jobs").iterdir()
    (trial,) = (path for path in job.iterdir() if path.is_dir())
    result = json.loads((trial / "result.json").read_text())
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}} and result["exception_info"] is None
    assert result["started_at"] <= result["agent_execution"]["started_at"] <= result["finished_at"]
    document = json.loads((trial / "agent/trajectory.json").read_text())
    assert [step["step_id"] for step in document["steps"]] == [1, 2] and document["schema_version"] == "ATIF-v1.6"
    assert document["steps"][1]["observation"]["results"][0]["content"] == "done\n"
    assert json.loads((job / "result.json").read_text())["outcomes"] == {"passed": 1}
    assert {path.name for path in (trial / "verifier").iterdir()} == {"reward.json", "ctrf.json", "test-stdout.txt"}
    assert main([*arguments, "nop"]) == 1


def test_wrong_use_is_answered_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(write_task(tmp_path / "task")), "--sandbox", "local"]
    for number in ("0", "-1", "two"):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--jobs", number])
        assert ended.value.code == 2 and f"'{number}' is not a whole number above 0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*arguments, "--out", str(tmp_path / "file")]) == 2
    assert (
        capsys.readouterr().err
        == f"rsi_sandbox: --out {tmp_path}/file: Not a directory; give a folder that can be written\n"
    )


def test_nothing_that_a_task_says_moves_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = r"\u001b]0;title\u0007one\ntwo\u001b[2J"
    report = f'{{"results":{{"tests":[{{"name":"{name}","status":"failed"}}]}}}}'
    script = f"echo 1 > /logs/verifier/reward.txt; cat > /logs/verifier/ctrf.json <<'END'\n{report}\nEND\n"
    folder = write_task(tmp_path / "task", script)
    assert (
        main(["run", str(folder), "--sandbox", "local", "--out", str(tmp_path / "jobs"), "--agent", "a=\x1b[2J\n:"])
        == 1
    )
    shown = capsys.readouterr().out
    assert "reward 1, but one two failed" in shown and "\x1b" not in shown and shown.count("\n") == 3
