"""Images: the base of the built-in tasks (pulled, or made here where no registry answers), and tasks' own."""

import hashlib
import io
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.utils
import requests.exceptions
from requests.packages.urllib3.exceptions import HTTPError

from .archive import pack
from .dockerfile import BASE, STAND_INS, read_folder, read_text
from .legacy import is_private
from .records import File, SandboxError

_SOURCE = "debian:bookworm-slim"


def make_base(client: Any) -> str:
    """Make sure that `rsi-base:bookworm` exists; returns how it came about. Needs root only for debootstrap."""
    if client.images.list(name=BASE):
        return f"{BASE} is there already"
    repository, tag = BASE.split(":")
    try:
        client.images.pull(_SOURCE).tag(repository, tag)
        return f"{BASE} is {_SOURCE}, pulled"
    except docker.errors.APIError as error:
        refusal = str(error.explanation or error)
    with debootstrap() as root, tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        left_out = "--exclude=./var/cache/apt/archives/*.deb --exclude=./var/lib/apt/lists/* --exclude=./dev/*".split()
        _must("tar", "-C", str(root), *left_out, "-cf", archive.name, ".")
        client.api.import_image_from_file(archive.name, repository=repository, tag=tag, changes=['CMD ["/bin/bash"]'])
    return f"{BASE} was made by debootstrap ({_SOURCE} cannot be pulled: {refusal})"


@contextmanager
def debootstrap(*options: str) -> Iterator[Path]:
    """The root directory of a new, minimal Debian bookworm, removed afterwards. Needs root."""
    if not shutil.which("debootstrap"):
        raise SandboxError("an image that cannot be pulled is made by debootstrap: install it")
    with tempfile.TemporaryDirectory() as folder:
        _must("debootstrap", "--variant=minbase", *options, "bookworm", f"{folder}/root")
        yield Path(folder) / "root"


def _must(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SandboxError(f"{command[0]} failed ({done.returncode}): {(done.stdout + done.stderr)[-500:]}")


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
    if (ignored := folder / ".dockerignore").exists():
        sent = docker.utils.exclude_paths(str(folder), read_text(ignored).splitlines())
        files = [file for file in files if file.path[1:] in sent]
    text = read_text(folder / "Dockerfile")
    own = {"scratch", *re.findall(r"(?im)^\s*FROM\s+\S+\s+AS\s+(\S+)", text)}

    def mapped(found: re.Match[str]) -> str:
        return found[1] + (found[2] if found[2] in own else find_base(client, found[2]))

    text = re.sub(r"(?im)^(\s*FROM\s+(?:--\S+\s+)*)([^\s$]+)(?=\s|$)", mapped, text)
    tag = f"rsi-task:{hashlib.sha256((text + repr(files)).encode()).hexdigest()[:24]}"
    if client.images.list(name=tag):
        return tag
    context = pack([*(file for file in files if file.path != "/Dockerfile"), File("/Dockerfile", text.encode())])
    options = {"fileobj": io.BytesIO(context), "custom_context": True, "rm": True, "forcerm": True, "decode": True}
    said, deadline = "", time.monotonic() + seconds
    try:
        for event in client.api.build(**options, tag=tag, timeout=math.ceil(seconds)):
            said = (said + str(event.get("stream", event.get("error", ""))))[-500:]
            if "error" in event or time.monotonic() > deadline:  # a build that is not listened to ends
                break
        else:
            return tag
        failure = event.get("error") or f"it took more than {seconds:g} s"
    except (docker.errors.DockerException, requests.exceptions.RequestException, HTTPError) as error:
        failure = f"{error}"
    raise SandboxError(f"{folder / 'Dockerfile'}: the image build failed: {failure}; it said: {said!r}")
