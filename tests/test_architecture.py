"""The rules that keep the code auditable: imports go one way, files stay short, the whole stays small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rsi": sorted((ROOT / "rsi").rglob("*.py")),
    "rsi_kernels": sorted((ROOT / "kernels" / "rsi_kernels").rglob("*.py")),
    "rsi_sandbox": sorted((ROOT / "sandbox" / "rsi_sandbox").rglob("*.py")),
}
FILES = [path for paths in SOURCES.values() for path in paths]
MAX_FILES, MAX_LINES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 80, 14500, 425, 60


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports absolutely."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


# `requests` comes with `docker`, whose errors it shows.
@pytest.mark.parametrize(
    ("package", "allowed"), [("rsi_kernels", {"torch", "triton", "fla"}), ("rsi_sandbox", {"docker", "requests"})]
)
def test_embeddable_packages_import_only_what_they_say(package: str, allowed: set[str]) -> None:
    for path in SOURCES[package]:
        foreign = imported(path) - set(sys.stdlib_module_names)
        assert foreign <= allowed, f"{path.relative_to(ROOT)} imports {foreign - allowed}"


def test_the_command_line_is_read_without_torch() -> None:
    code = "import sys; from rsi.config import parse; parse(['--seed', '1']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_size() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    print(f"{len(lengths)} source files, {sum(lengths.values())} lines")
    assert len(lengths) <= MAX_FILES and sum(lengths.values()) <= MAX_LINES
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short_docstrings_apart() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
                length = (node.end_lineno or 0) - start + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}


def test_no_folder_is_an_importable_kernels_package() -> None:
    # Hugging Face's package of that name must win where both are on the path.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "sandbox" / "__init__.py").exists()
