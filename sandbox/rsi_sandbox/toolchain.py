"""An offline stand-in for what test scripts fetch from the internet: its own Python, pytest and a CTRF report.

A read-only volume at /opt/rsi, first on the PATH of docker verifiers alone. Its Python comes with its own loader and
libraries, so that it owes nothing to an image an agent has worked in.
"""

import hashlib
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from .archive import pack
from .image import debootstrap
from .records import File

IMAGE, ROOT = "rsi-toolchain:bookworm", "/opt/rsi"
REPORT = "/logs/verifier/ctrf.json"
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "__pycache__")
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}

# No configuration or conftest.py from outside /tests, nothing from the environment; a report that says "ended early"
# until pytest has ended, for code under test may end the process with status 0.
_PYTEST = f"""#!/bin/bash
export PYTHONDONTWRITEBYTECODE=1; unset PYTEST_ADDOPTS PYTEST_PLUGINS LD_PRELOAD LD_LIBRARY_PATH
settings=/dev/null
for file in /tests/pytest.ini /tests/tox.ini /tests/setup.cfg; do [[ -f $file ]] && settings=$file && break; done
echo '{{"results":{{"tests":[{{"name":"pytest ended early","status":"failed"}}]}}}}' 2>/dev/null >{REPORT}
exec {ROOT}/lib/loader --library-path {ROOT}/lib {ROOT}/bin/python3.11 -I -m pytest -c $settings \\
  --rootdir /tests --confcutdir /tests -p rsi_ctrf -p no:cacheprovider "$@"
"""
_UVX = """#!/bin/bash
while (($#)); do
  case $1 in
    pytest) shift; exec pytest "$@" ;;
    -p | --python | -w | --with | --from | --directory | --index-url) shift 2 ;;
    -*) shift ;;
    *) echo "uvx: $1 is not to be had offline" >&2; exit 127 ;;
  esac
done
"""
_UV = """#!/bin/bash
case $1 in
  run) shift ;;
  *) exit 0 ;;
esac
while [[ $1 == -* ]]; do
  case $1 in -p | --python | -w | --with | --directory | --project) shift 2 ;; *) shift ;; esac
done
[[ $1 == python* && $2 == -m && $3 == pytest ]] && shift 2
exec "$@"
"""
_APT = """#!/bin/bash
for package in "$@"; do
  case $package in
    -* | update | install | upgrade | clean | autoremove | curl | ca-certificates | python3-pip | python3-venv) ;;
    *) dpkg -s "${package%%=*}" >/dev/null 2>&1 || { echo "apt-get: there is no $package offline" >&2; exit 100; } ;;
  esac
done
"""
_CURL = """#!/bin/bash
case "$*" in
  *astral.sh/uv*) echo 'mkdir -p "$HOME/.local/bin"; rm -rf "$HOME/.local/bin/env"; : >"$HOME/.local/bin/env"' ;;
  *) echo "curl: (6) there is no network" >&2; exit 6 ;;
esac
"""
_PIP = """#!/bin/bash
[[ $1 == install ]] || exit 1
"""
PROGRAMS = {
    "pytest": _PYTEST, "uvx": _UVX, "uv": _UV, "apt-get": _APT, "apt": _APT, "curl": _CURL, "pip": _PIP, "pip3": _PIP,
}  # fmt: skip
_PLUGIN = f'''"""Writes every test's outcome, by name, as a CTRF report."""
import json

def pytest_addoption(parser):
    parser.addoption("--ctrf", default="{REPORT}")

def pytest_configure(config):
    Report.outcomes, Report.paths = {{}}, {{config.getoption("--ctrf"), "{REPORT}"}}
    config.pluginmanager.register(Report())

class Report:
    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid or "collection"] = "failed"

    def pytest_runtest_logreport(self, report):
        if report.failed or self.outcomes.get(report.nodeid) is None or report.when == "call":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self):
        tests = [dict(name=name, status=status, duration=0) for name, status in self.outcomes.items()]
        for path in self.paths:
            try:
                with open(path, "w") as file:
                    json.dump(dict(results=dict(tool=dict(name="pytest"), tests=tests)), file)
            except OSError as error:
                print("no CTRF report:", error)
'''


def make_toolchain(client: Any) -> str:
    """Make sure that the toolchain's image exists; returns how it came about. Needs root and debootstrap."""
    if client.images.list(name=IMAGE):
        return f"{IMAGE} is there already"
    with debootstrap("--include=python3,python3-pytest") as root, tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        pack_toolchain(root, Path(archive.name))
        repository, tag = IMAGE.split(":")
        client.api.import_image_from_file(archive.name, repository=repository, tag=tag)
    return f"{IMAGE} was made by debootstrap"


def pack_toolchain(root: Path, archive: Path) -> None:
    """Write the toolchain out of the Debian system at `root` into a tar file."""

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        return None if set(member.name.split("/")) & {*_LEFT_OUT} else member

    (libraries,) = root.glob("usr/lib/*-linux-gnu")
    where = ROOT.lstrip("/")
    with tarfile.open(archive, "w") as tar:
        tar.add(root / "usr/bin/python3.11", f"{where}/bin/python3.11")
        tar.add(root / "usr/lib/python3.11", f"{where}/lib/python3.11", filter=keep)
        for path in sorted((root / "usr/lib/python3/dist-packages").iterdir()):
            tar.add(path, f"{where}/lib/python3.11/{path.name}", filter=keep)
        for path in sorted(libraries.glob("*.so*")):
            if path.is_file() and not path.name.startswith(("libicu", "libperl", "libLLVM")):
                _add_bytes(tar, f"{where}/lib/{path.name}", path.read_bytes(), 0o755)
        loader = libraries / _LOADERS[libraries.name.partition("-")[0]]
        _add_bytes(tar, f"{where}/lib/loader", loader.read_bytes(), 0o755)


def mount(client: Any, labels: dict[str, str]) -> dict[str, dict[str, str]]:
    """The toolchain's volume as docker's `volumes`, filled at its first use; empty where no toolchain was made."""
    if not client.images.list(name=IMAGE):
        return {}
    name = f"rsi-toolchain-{hashlib.sha256(repr((PROGRAMS, _PLUGIN)).encode()).hexdigest()[:12]}"
    if not any(volume.name == name for volume in client.volumes.list()):
        # Docker fills a new volume with what the image has at that place; the programs are this version's.
        bound = {name: {"bind": ROOT, "mode": "rw"}}
        container = client.containers.create(IMAGE, ["true"], volumes=bound, labels=labels)
        programs = [File(f"/bin/{program}", text.encode(), 0o755) for program, text in PROGRAMS.items()]
        container.put_archive(ROOT, pack([*programs, File("/lib/python3.11/rsi_ctrf.py", _PLUGIN.encode())]))
        container.remove()
    return {name: {"bind": ROOT, "mode": "ro"}}


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))
