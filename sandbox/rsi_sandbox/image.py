"""Images: the base of the built-in tasks (pulled, or made here where no registry answers), and tasks' own."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import docker
import docker.errors

from .archive import pack
from .records import File, SandboxError
from .task import Task, read_folder

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
            [
                "tar",
                "-C",
                str(root),
                "--exclude=./var/cache/apt/archives/*.deb",
                "--exclude=./var/lib/apt/lists/*",
                "--exclude=./dev/*",
                "-cf",
                str(archive),
                ".",
            ],
        ):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise SandboxError(f"{command[0]} failed ({done.returncode}): {(done.stdout + done.stderr)[-500:]}")
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=['CMD ["/bin/bash"]'])
    return f"{BASE} was made by debootstrap ({_SOURCE} cannot be pulled: {refusal})"


def find_base(client: Any, name: str) -> str:
    """`name` where it is here, else our own bookworm; nothing is ever put in the place of another image."""
    for candidate in (name, BASE) if name.startswith("debian:bookworm") else (name,):
        try:
            client.images.get(candidate)
            return candidate
        except docker.errors.ImageNotFound:
            continue
    try:
        client.images.pull(name)
        return name
    except docker.errors.APIError as error:
        raise SandboxError(
            f"image {name} is neither here nor to be had ({error.explanation}): run python -m rsi_sandbox image"
        ) from None


def build_image(client: Any, task: Task) -> str:
    """Build the task's Dockerfile, its bases mapped to those that are here; returns the image's name."""
    folder = task.folder / "environment"
    files = read_folder(folder, "/")
    tag = f"rsi-task:{hashlib.sha256(repr(files).encode()).hexdigest()[:24]}"
    if client.images.list(name=tag):
        return tag
    text = (folder / "Dockerfile").read_text()
    text = re.sub(r"(?im)^(\s*FROM\s+)(debian:bookworm\S*)", lambda found: found[1] + find_base(client, found[2]), text)
    kept = [file for file in files if file.path != "/Dockerfile"]
    context = pack([*kept, File("/Dockerfile", text.encode())])
    with tempfile.TemporaryFile() as archive:
        archive.write(context)
        archive.seek(0)
        try:
            client.images.build(fileobj=archive, custom_context=True, tag=tag, rm=True, forcerm=True)
        except docker.errors.BuildError as error:
            raise SandboxError(f"{folder / 'Dockerfile'}: the image build failed: {error}") from None
    return tag
