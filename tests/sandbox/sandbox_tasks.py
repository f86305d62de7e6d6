"""Task folders and backends for the sandbox tests."""

import os
from pathlib import Path

import docker
import pytest
from rsi_sandbox import Backend, SandboxError, open_backend

TEST_SH = """\
names= passed=0 total=0
check() {
  local status=failed; total=$((total + 1))
  if eval "$2" 2>/dev/null; then status=passed; passed=$((passed + 1)); fi
  names+="${names:+,}{\\"name\\":\\"$1\\",\\"status\\":\\"$status\\"}"
}
check content '[[ -f out.txt && $(<out.txt) == "$(sort words.txt)" ]]'
check kept '[[ -f words.txt ]]'
echo "{\\"results\\":{\\"tests\\":[$names]}}" >/logs/verifier/ctrf.json
echo $((passed == total)) >/logs/verifier/reward.txt
"""
SOLUTION = "sort words.txt > out.txt"


def write_task(folder: Path, test: str = TEST_SH, **files: str) -> Path:
    """A small, valid task folder; `files` replaces or adds files."""
    contents = {
        "task.toml": 'version = "1.0"\n[metadata]\nfamily = "sorting"\nsuite = "core"\nchecks = 2\n'
        "[verifier]\ntimeout_sec = 20\n[environment]\nmemory_mb = 512\n",
        "instruction.md": "Sort words.txt into out.txt.\n",
        "environment/Dockerfile": "# a comment\nFROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ ./\n"
        "ENV COLOUR=red\n",
        "environment/files/words.txt": "pear\napple\nfig\n",
        "tests/test.sh": test,
        "solution/solve.sh": SOLUTION + "\n",
    } | files
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def open_or_skip(kind: str) -> Backend:
    try:
        return open_backend(kind, "tests", starts=2)  # type: ignore[arg-type]
    except SandboxError as error:
        if os.environ.get("CI") or kind == "local":
            raise
        pytest.skip(f"{error}")


def need_toolchain(image: str) -> None:
    """Skip, in CI fail, where the offline pytest has not been made."""
    if not docker.from_env().images.list(name=image):
        reason = "no toolchain image: python -m rsi_sandbox image --toolchain"
        if os.environ.get("CI"):
            raise SandboxError(reason)
        pytest.skip(reason)
