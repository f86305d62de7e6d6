"""Task folders: what is read, and what each mistake is answered with."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rsi_sandbox import Backend, SandboxError, TaskError, load_task, open_backend, verify
from rsi_sandbox.__main__ import main
from sandbox_tasks import open_or_skip, write_task


def test_fields_and_defaults(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "sort-words"))
    assert (task.name, task.workdir, task.artifacts, task.memory_mb) == ("sort-words", "/app", ("/app",), 512)
    assert (task.family, task.suite, task.checks, task.network) == ("sorting", "core", 2, False)
    assert (task.agent_timeout, task.verifier_timeout) == (600.0, 20.0)
    assert [file.path for file in task.environment] == ["/app", "/app/words.txt"]
    assert task.variables == (("COLOUR", "red"),) and task.docker_only == ""


@pytest.mark.parametrize(
    ("copy", "paths"),
    [
        ("COPY files/words.txt /data/in.txt", ["/data/in.txt"]),
        ("COPY files/words.txt /data/", ["/data/words.txt"]),
        ("COPY files/words.txt files/words.txt ./", ["/app/words.txt", "/app/words.txt"]),
        ("COPY files /data", ["/data", "/data/words.txt"]),
    ],
)
def test_copy_as_docker_does(tmp_path: Path, copy: str, paths: list[str]) -> None:
    dockerfile = f"FROM debian:bookworm\nWORKDIR /app\n{copy}\n"
    task = load_task(write_task(tmp_path, **{"environment/Dockerfile": dockerfile}))
    assert [file.path for file in task.environment] == paths


MISTAKES = [
    ("task.toml", None, "task.toml: file: missing"),
    ("task.toml", "version = ", "task.toml: TOML"),
    ("task.toml", "[agent]\ntimeout_sec = 'long'", "task.toml: agent.timeout_sec: 'long'"),
    ("task.toml", "[verifier]\ntimeout_sec = -1", "task.toml: verifier.timeout_sec: -1"),
    ("task.toml", "[environment]\nmemory_mb = 0", "task.toml: environment.memory_mb: 0"),
    ("task.toml", "[environment]\nnetwork_mode = 'offline'", "task.toml: environment.network_mode: 'offline'"),
    ("task.toml", "artifacts = ['out.txt']", "task.toml: artifacts[0].source: 'out.txt'"),
    ("task.toml", "artifacts = ['/app/../etc']", "task.toml: artifacts[0].source: '/app/../etc'"),
    ("task.toml", "artifacts = 'x'", "task.toml: artifacts: 'x'"),
    ("task.toml", "[metadata]\nchecks = 'two'", "task.toml: metadata.checks: 'two'"),
    ("task.toml", "metadata = 3", "task.toml: metadata: 3"),
    ("instruction.md", None, "instruction.md: file: missing"),
    ("instruction.md", " \n", "instruction.md: instruction: empty"),
    ("tests/test.sh", None, "tests/test.sh: file: missing"),
    ("environment/Dockerfile", None, "environment/Dockerfile: file: missing"),
    ("environment/Dockerfile", "WORKDIR /app\n", "environment/Dockerfile: FROM: missing"),
    ("environment/Dockerfile", "FROM debian:bookworm\nCOPY no /app/", "Dockerfile: line 2: COPY: 'no'"),
    ("environment/Dockerfile", "FROM debian:bookworm\n\nCOPY ../tests /app/", "Dockerfile: line 3: COPY: '../tests'"),
    ("environment/Dockerfile", "FROM debian:bookworm\nENV A", "Dockerfile: line 2: ENV"),
    ("environment/Dockerfile", "FROM debian:bookworm\nWORKDIR /", "Dockerfile: line 2: WORKDIR"),
    ("environment/Dockerfile", "FROM debian:bookworm\nWORKDIR $WHERE", "Dockerfile: line 2: WORKDIR: '$WHERE'"),
]


@pytest.mark.parametrize(("name", "text", "message"), MISTAKES)
def test_mistakes_name_file_and_field(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    folder = write_task(tmp_path / "task")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(TaskError) as caught:
        load_task(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="not a directory"):
        load_task(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["environment/files/words.txt", "tests", "instruction.md", "task.toml", "solution"])
@pytest.mark.parametrize("target", ["out of it", "itself", "nothing", "a folder"])
def test_links_lead_to_files_of_the_folder_or_are_refused(tmp_path: Path, name: str, target: str) -> None:
    folder = write_task(tmp_path / "task")
    place = folder / name
    moved = place.rename(tmp_path / "moved")
    where = {"out of it": moved, "itself": place, "nothing": folder / "x", "a folder": folder / "environment"}
    place.symlink_to(where[target])
    with pytest.raises(TaskError, match=f"{name}: (link: leads to no regular file|file: )"):
        load_task(folder)
    if name == "environment/files/words.txt":
        place.unlink()
        moved.rename(folder / "environment/words")
        place.symlink_to("../words")
        assert load_task(folder).environment[1].data == b"pear\napple\nfig\n"


@pytest.mark.parametrize(
    ("lines", "workdir"),
    [
        ("FROM debian:bookworm AS build\nWORKDIR /src\nENV A=1\nFROM debian:bookworm\nCOPY --from=build /x /x", "/app"),
        ("FROM --platform=linux/amd64 debian:bookworm\nWORKDIR /a\nWORKDIR b", "/a/b"),
        ("FROM debian:bookworm\nRUN true\nENV HERE=/srv/x OTHER=y\nWORKDIR ${HERE}/$OTHER", "/srv/x/y"),
        ("ARG V=bookworm\nFROM debian:$V\nCOPY *.txt /x/\nENV A.B=1\nWORKDIR '/w'", "/w"),
        ("FROM debian:bookworm\nENV PATH=/opt/bin:$PATH\nRUN <<END\nENV nothing\nEND", "/app"),
    ],
)
def test_what_docker_builds_is_left_to_docker(tmp_path: Path, lines: str, workdir: str) -> None:
    task = load_task(write_task(tmp_path, **{"environment/Dockerfile": f"{lines}\n"}))
    assert (task.workdir, task.variables) == (workdir, ()) and "use docker" in task.docker_only
    assert any("environment.workdir: not given" in note for note in task.notes) == (workdir == "/app")


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM debian:bookworm\nWORKDIR /app\nRUN make\n", "line 3: RUN"),
        ("FROM debian:bookworm\nUSER nobody\n", "line 2: USER"),
        ("FROM ubuntu:24.04\n", "ubuntu:24.04"),
        ("FROM debian:bookworm\nENV A=$B\n", "line 2: ENV"),
        ("FROM debian:bookworm\nCOPY f* /app/\n", "line 2: COPY"),
        ("FROM debian:bookworm\nCOPY --chown=1 files /app\n", "line 2: COPY"),
    ],
)
def test_local_refuses_what_it_does_not_understand(tmp_path: Path, dockerfile: str, message: str) -> None:
    folder = write_task(tmp_path, **{"environment/Dockerfile": dockerfile})
    with open_backend("local", "tests") as backend:
        with pytest.raises(TaskError, match=message):
            backend.start(load_task(folder))
        write_task(tmp_path, **{"environment/.dockerignore": "*.md\n"})
        with pytest.raises(TaskError, match="dockerignore"):
            backend.start(load_task(folder))


def test_local_refuses_a_task_that_needs_a_network(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, **{"task.toml": "[environment]\nnetwork_mode = 'public'\n"}))
    with open_backend("local", "tests") as backend, pytest.raises(TaskError, match="network_mode"):
        backend.start(task)


@pytest.mark.docker
def test_docker_builds_other_dockerfiles(tmp_path: Path) -> None:
    dockerfile = (
        "FROM debian:bookworm-slim\nWORKDIR /work\nCOPY files/ ./\n"
        "RUN sort words.txt > sorted.txt && echo built > stale.txt\n"
    )
    test = (
        "cd /work; [[ $(<sorted.txt) == apple* && ! -e stale.txt ]] && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n"
    )
    task = load_task(write_task(tmp_path, test, **{"environment/Dockerfile": dockerfile}))
    with open_or_skip("docker") as backend:
        sandbox = backend.start(task)
        assert sandbox.run("pwd; cat sorted.txt").output == "/work\napple\nfig\npear\n"
        sandbox.run("rm stale.txt")
        assert verify(backend, task, sandbox).strict


@pytest.mark.docker
def test_what_an_image_says_holds_for_agent_and_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its PATH, variables, user and that one's home; a stand-in for its base; what .dockerignore leaves out."""
    lines = ["FROM rsi-unknown-base:1", "RUN useradd -m someone", "COPY . /opt/given", "RUN mkdir /opt/tool"]
    lines += ["RUN printf '#!/bin/bash\\necho tool $LEVEL' > /opt/tool/tool; chmod 755 /opt/tool/tool"]
    lines += ['ENV PATH="/opt/tool:$PATH" LEVEL=3', "ENV odd.name=1", "WORKDIR /home/someone", "USER someone"]
    said = '$(tool; id -un; ls) == "tool 3\nroot\nout" ]] && r=1 || r=0; echo $r >/logs/verifier/reward.txt'
    files = {"environment/Dockerfile": "\n".join(lines), "environment/.dockerignore": "# no\nfiles\n"}
    folder = write_task(
        tmp_path / "task", "[[ " + said.replace('"tool 3\nroot\nout"', "$'tool 3\\nroot\\nout'"), **files
    )
    arguments = ["run", str(folder), "--sandbox", "docker", "--out", str(tmp_path / "jobs"), "--agent"]
    command = (
        "[[ $(tool; id -un; cd; pwd; ls /opt/given) == $'tool 3\nsomeone\n/home/someone\nDockerfile' ]] && touch out"
    )
    assert main([*arguments, command, "--base", "rsi-unknown-base:1=rsi-base:bookworm"]) == 0, capsys.readouterr()
    with open_or_skip("docker") as backend, backend.start(load_task(folder)) as sandbox:
        assert sandbox.run("HOME=/tmp; cd").exit_code == 0
        assert sandbox.run("tool; pwd; cd; pwd", fresh=True).output == "tool 3\n/home/someone\n/home/someone\n"


@pytest.mark.docker
@pytest.mark.parametrize("run", ["for i in {1..60}; do echo $i; sleep 1; done", "sleep 60"], ids=["loud", "quiet"])
def test_a_build_ends_at_its_limit(tmp_path: Path, run: str) -> None:
    files = {"environment/Dockerfile": f'FROM debian:bookworm\nRUN ["bash", "-c", "{run}; : {time.time()}"]\n'}
    task = load_task(write_task(tmp_path, **files, **{"task.toml": "[environment]\nbuild_timeout_sec = 3\n"}))
    with open_or_skip("docker") as backend:
        begun = time.monotonic()
        with pytest.raises(SandboxError, match=r"image build failed: .*(3 s|timed out)"):
            backend.start(task)
        assert time.monotonic() - begun < 40


def test_check_command(backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_task(tmp_path / "good")
    assert main(["check", "--sandbox", backend.kind, str(good)]) == 0
    assert "ok     good: oracle 1 (2 checks), no-op fails (1 of them pass)\n" in capsys.readouterr().out
    toml = (good / "task.toml").read_text()
    (good / "task.toml").write_text(toml.replace("checks = 2", "checks = 3"))
    assert main(["check", "--sandbox", backend.kind, str(good)]) == 0
    assert "metadata.checks is 3, the report names 2" in capsys.readouterr().out
    (good / "solution/solve.sh").write_text("true\n")
    assert main(["check", "--sandbox", backend.kind, str(good)]) == 1
    shutil.rmtree(good / "tests")
    assert main(["check", "--sandbox", backend.kind, str(good)]) == 2
    assert "tests/test.sh: file: missing" in capsys.readouterr().err


# The command line where the docker package is not installed, and where it is but no daemon answers.
ABSENT = "import sys; sys.modules['docker'] = None\n"
PROGRAM = "import sys\nfrom rsi_sandbox.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.mark.parametrize(
    ("before", "reason"),
    [(ABSENT, "the Python package docker is missing"), ("", "no Docker daemon answers")],
    ids=["no package", "no daemon"],
)
def test_local_needs_nothing_of_docker(tmp_path: Path, before: str, reason: str) -> None:
    folder = write_task(tmp_path / "task")

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", before + PROGRAM, *arguments]
        environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/no-daemon"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    for kind, why in (("local", "asked for"), ("auto", reason)):
        for command in ("run", "check"):
            done = call(command, str(folder), "--sandbox", kind)
            assert done.returncode == 0 and f"sandbox local: {why}" in done.stdout, done
    for arguments in (("check", str(folder), "--sandbox", "docker"), ("list",), ("reap",), ("image", "--toolchain")):
        done = call(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.count("\n") == 1 and f"rsi_sandbox: {reason}" in done.stderr, done
