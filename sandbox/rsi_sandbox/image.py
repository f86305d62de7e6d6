"""Images: the base of the built-in tasks (pulled, or made here where no registry answers), and tasks' own."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests.exceptions

from .archive import pack
from .dockerfile import read_folder, read_text
from .legacy import is_private
from .records import File, SandboxError
from .task import Task

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


# Images that another one, made here, may stand in for: by the beginning of the name. `--base NAME=LOCAL` adds to it.
STAND_INS = {"debian:bookworm": BASE}


def find_base(client: Any, name: str) -> str:
    """`name` where it is here, else its stand-in, else pulled; nothing else is ever put in the place of an image."""
    candidates = [name, *(local for prefix, local in STAND_INS.items() if name.startswith(prefix))]
    for candidate in candidates:
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
            f"image {name} is neither here nor to be had ({error.explanation}): run python -m rsi_sandbox image, "
            f"or name a stand-in with --base {name}=LOCAL"
        ) from None


def build_image(client: Any, folder: Path, seconds: float) -> str:
    """Build the folder's Dockerfile, its bases mapped to those that are here; returns the image's name."""
    legacy = (folder / "task.yaml").is_file()  # there the tests lie beside the Dockerfile
    files = [file for file in read_folder(folder, "/") if not (legacy and is_private(file.path[1:]))]
    text = read_text(folder / "Dockerfile")
    text = re.sub(
        r"(?im)^(\s*FROM\s+(?:--\S+\s+)*)([^\s$]+)(?=\s|$)",
        lambda found: found[1] + _base(client, text, found[2]),
        text,
    )
    tag = f"rsi-task:{hashlib.sha256((text + repr(files)).encode()).hexdigest()[:24]}"
    if client.images.list(name=tag):
        return tag
    context = pack([*(file for file in files if file.path != "/Dockerfile"), File("/Dockerfile", text.encode())])
    with tempfile.TemporaryFile() as archive:
        archive.write(context)
        archive.seek(0)
        try:
            client.images.build(
                fileobj=archive, custom_context=True, tag=tag, rm=True, forcerm=True, timeout=int(seconds) + 1
            )
        except (docker.errors.BuildError, docker.errors.APIError, requests.exceptions.RequestException) as error:
            raise SandboxError(f"{folder / 'Dockerfile'}: the image build failed: {error}") from None
    return tag


def _base(client: Any, text: str, name: str) -> str:
    stages = re.findall(r"(?im)^\s*FROM\s+\S+\s+AS\s+(\S+)", text)
    return name if name in stages or name == "scratch" else find_base(client, name)


def leaks(files: Iterable[tuple[str, bytes]], task: Task) -> list[str]:
    """Paths among the agent's files that hold a file of the task's tests or solution, or a large part of one."""
    secrets = [
        (file.path, set(_long_lines(file.data))) for file in (*task.tests, *task.solution) if file.data is not None
    ]
    found = []
    for path, data in files:
        lines = set(_long_lines(data))
        for secret, wanted in secrets:
            if len(wanted) >= 3 and len(lines & wanted) > len(wanted) / 2:
                found.append(f"{path} holds {secret}")
    return found


def _long_lines(data: bytes) -> list[bytes]:
    return [line.strip() for line in data.splitlines() if len(line.strip()) >= 12]
