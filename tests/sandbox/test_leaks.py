"""`check` finds what an agent's system holds of tests and solution, wherever it lies, and nothing in a clean one."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rsi_sandbox import Backend, Task, leaks, load_task
from rsi_sandbox.__main__ import main
from sandbox_tasks import SOLUTION, open_or_skip, write_task

SECRET = "".join(f"answer line number {i}\n" for i in range(9))


def search(backend: Backend, task: Task) -> list[str]:
    with backend.start(task) as sandbox:
        return leaks.leaks(sandbox, task)


def git(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, input=given, capture_output=True).stdout


def commit(folder: Path, message: str = "change") -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)


def with_history(files: Path) -> None:
    """A repository whose history, not whose working tree, holds the solution and what the tests want."""
    git(files, "init", "-q")
    commit(files)
    (files / "solve").write_text(SOLUTION + "\n")
    (files / "wanted").write_text("a first line\n" + SECRET)
    commit(files)
    (files / "solve").unlink()
    (files / "wanted").unlink()
    commit(files)


def packed(files: Path) -> None:
    with_history(files)
    git(files, "gc", "-q")
    assert not list(files.glob(".git/objects/??"))


def unreachable(files: Path) -> None:
    with_history(files)
    git(files, "reset", "-q", "--hard", "HEAD~2")
    git(files, "reflog", "expire", "--all", "--expire=now")
    assert not git(files, "log", "--all", "-p", "--", "solve")


def stashed(files: Path) -> None:
    git(files, "init", "-q")
    commit(files)
    (files / "words.txt").write_text(SECRET)
    (files / "solve").write_text(SOLUTION)
    git(files, "stash", "push", "-q", "--include-untracked")


def renamed(files: Path) -> None:
    with_history(files)
    (files / ".git").rename(files / "dot_git")


@pytest.mark.parametrize("hide", [with_history, packed, unreachable, stashed, renamed])
def test_git_history_is_searched(backend: Backend, tmp_path: Path, hide: Callable[[Path], None]) -> None:
    folder = write_task(tmp_path / "task", **{"tests/wanted.txt": SECRET})
    hide(folder / "environment/files")
    found = search(backend, load_task(folder))
    place = "/app/dot_git" if hide is renamed else "/app/.git"
    assert len(found) == 2 and all(f" of {place} holds " in leak for leak in found), found
    assert sorted(leak.rpartition(" ")[2] for leak in found) == ["/solution/solve.sh", "/tests/wanted.txt"]


def test_an_honest_history_is_clean(backend: Backend, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", **{"tests/wanted.txt": SECRET})
    files = folder / "environment/files"
    git(files, "init", "-q")
    for number in range(3):
        (files / "notes").write_text(f"answer line number {number}\n{SOLUTION[:-1]}\n")
        commit(files)
    assert search(backend, load_task(folder)) == []


def test_leaks_are_found_and_fail_the_check(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_task(
        tmp_path / "task", **{"tests/wanted.txt": SECRET, "environment/files/old/notes": "hello\n" + SECRET}
    )
    assert search(backend, load_task(folder)) == ["/app/old/notes holds /tests/wanted.txt"]
    assert main(["check", "--sandbox", backend.kind, str(folder)]) == 1
    assert "leak: /app/old/notes holds /tests/wanted.txt" in capsys.readouterr().out


def test_planted_tests_are_found_anywhere(backend: Backend, tmp_path: Path) -> None:
    """Whole, in part or with other line ends, in odd places; not where it is a quarter or a line."""
    folder = write_task(tmp_path / "task")
    test = (folder / "tests/test.sh").read_bytes()
    planted = {
        "/opt/.cache/x": test,
        "/home/.x/test.sh": b"\n" + test + b"\n\n",
        "/srv/\xff/\u4e00": test.replace(b"\n", b"\r\n"),
        "/usr/share/doc/y" if backend.kind == "docker" else "/var/y": test[: len(test) * 2 // 3],
        "/var/lib/odd/a/b/c/d": b"\0" * (5 << 20) + b"\n" + test,
        "/opt/quarter": test[: len(test) // 4],
        "/opt/line": test.splitlines()[3],
    }
    dockerfile = "FROM debian:bookworm\nWORKDIR /app\nCOPY files/ ./\n"
    for number, (place, data) in enumerate(planted.items()):
        (folder / f"environment/{number}").write_bytes(data)
        dockerfile += f"COPY {number} {place}\n"
    (folder / "environment/Dockerfile").write_text(dockerfile)
    found = search(backend, load_task(folder))
    assert sorted(found) == sorted(f"{place} holds /tests/test.sh" for place in list(planted)[:5])


def test_what_the_instruction_says_is_no_leak(backend: Backend, tmp_path: Path) -> None:
    files = {"instruction.md": f"Run this:\n\n    {SOLUTION}\n", "environment/files/hint": SOLUTION}
    assert search(backend, load_task(write_task(tmp_path / "task", **files))) == []


def test_the_tests_of_every_step_are_looked_for(backend: Backend, tmp_path: Path) -> None:
    toml = 'schema_version = "1.4"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    folder = write_task(tmp_path / "task", **{"task.toml": toml, "environment/files/x": SECRET})
    for name, secret in (("one", "true\n"), ("two", SECRET)):
        write_task(folder / "steps" / name, secret)
    assert search(backend, load_task(folder)) == ["/app/x holds /tests/test.sh of two"]


@pytest.mark.docker
def test_what_a_build_left_and_what_it_removed(tmp_path: Path) -> None:
    """Of the image's layers the agent sees what the last one leaves, the contents of volumes included."""
    lines = ["FROM debian:bookworm", "WORKDIR /app", "COPY planted /opt/a", "RUN cp /opt/a /opt/b && rm /opt/a"]
    lines += ["RUN mkdir /data && mv /opt/b /data/b", "VOLUME /data"]
    folder = write_task(tmp_path / "task", **{"environment/planted": SECRET, "tests/wanted.txt": SECRET})
    (folder / "environment/Dockerfile").write_text("\n".join(lines) + "\n")
    with open_or_skip("docker") as backend:
        assert search(backend, load_task(folder)) == ["/data/b holds /tests/wanted.txt"]


def test_the_limits_are_told(backend: Backend, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "BYTES", 5)
    (told,) = search(backend, task)
    assert told.startswith("the search ended at /") and "above 0 GiB" in told
    monkeypatch.setattr(leaks, "BYTES", 1 << 40)
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    assert "or 0 s" in search(backend, task)[-1]


def test_objects_that_cannot_be_read_are_told(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_task(tmp_path / "task")
    files = folder / "environment/files"
    packed(files)
    (pack,) = files.glob(".git/objects/pack/*.pack")
    pack.chmod(0o644)
    pack.write_bytes(pack.read_bytes()[:-60])
    (files / ".git/objects/ab").mkdir()
    (files / ".git/objects/ab" / ("0" * 38)).write_text("no object")
    (files / ".git/objects/pack/pack-1.idx").write_text("no index")
    found = search(backend, load_task(folder))
    for name in (pack.name, "0" * 38, "pack-1.idx"):
        assert any(name in told and "could not be searched" in told for told in found), (name, found)
    monkeypatch.setattr(leaks, "GIT_BYTES", 50)
    assert any("above 0 MiB" in told for told in search(backend, load_task(folder)))


@pytest.mark.parametrize("options", [["--delta-base-offset"], []], ids=["by offset", "by name"])
@pytest.mark.parametrize("format", ["sha1", "sha256"])
def test_packs_are_read_as_git_reads_them(tmp_path: Path, options: list[str], format: str) -> None:
    git(tmp_path, "init", "-q", f"--object-format={format}")
    lines = [f"line {n * n} of a file that changes a little\n" for n in range(3000)]
    for number in range(30):
        lines[number * 90 : number * 90 + 3] = [f"change {number}\n" * number]
        (tmp_path / "file").write_text("".join(lines))
        (tmp_path / f"f{number}").write_text("x" * (70_000 if number == 7 else number))
        commit(tmp_path, f"commit {number}")
    git(tmp_path, "tag", "-am", "a tag", "v1")
    names = b"\n".join(
        line.split()[0] for line in git(tmp_path, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    )
    git(tmp_path, "pack-objects", "-q", "--depth=50", *options, "made", given=names + b"\n")
    (index,), (pack,) = tmp_path.glob("made-*.idx"), tmp_path.glob("made-*.pack")
    found = dict(leaks._unpack(index.read_bytes(), pack.read_bytes()))
    assert sorted(found) == sorted(names.decode().split())
    deltas = git(tmp_path, "verify-pack", "-v", str(index)).decode()
    assert "chain length = 3" in deltas
    for name, content in found.items():
        kind = git(tmp_path, "cat-file", "-t", name).decode().strip()
        assert content == git(tmp_path, "cat-file", kind, name)
