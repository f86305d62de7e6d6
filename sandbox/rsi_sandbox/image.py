"""The base image of the built-in tasks: Debian bookworm, pulled, or made here where no registry answers."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import docker

from .records import SandboxError

BASE = "rsi-base:bookworm"
_SOURCE = "debian:bookworm-slim"


def make_base() -> str:
    """Make sure that `rsi-base:bookworm` exists; returns how it came about. Needs root only for debootstrap."""
    client = docker.from_env(timeout=600)
    if client.images.list(name=BASE):
        return f"{BASE} is there already"
    repository, tag = BASE.split(":")
    try:
        client.images.pull(_SOURCE).tag(repository, tag)
        return f"{BASE} is {_SOURCE}, pulled"
    except docker.errors.APIError as error:
        refusal = str(error.explanation or error)
    if not shutil.which("debootstrap"):
        raise SandboxError(f"{_SOURCE} cannot be pulled ({refusal}): install debootstrap to make {BASE} here")
    with tempfile.TemporaryDirectory() as folder:
        root, archive = Path(folder) / "root", Path(folder) / "root.tar"
        for command in (
            ["debootstrap", "--variant=minbase", "bookworm", str(root)],
            ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*",
             "--exclude=./dev/*", "-cf", str(archive), "."],
        ):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise SandboxError(f"{command[0]} failed ({done.returncode}): {(done.stdout + done.stderr)[-500:]}")
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag,
                                          changes=['CMD ["/bin/bash"]'])
    return f"{BASE} was made by debootstrap ({_SOURCE} cannot be pulled: {refusal})"
