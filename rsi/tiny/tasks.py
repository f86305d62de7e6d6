"""Task sets: drawn from a seed, disjoint between training and the two evaluations, written as folders."""

import dataclasses
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rsi.tiny import flows
from rsi.tiny.families import CORE, HELD_OUT, TaskSpec, chain, config, core, find, layout, release, shelf, tally
from rsi.tiny.shell import Unsupported
from rsi.tiny.steps import Redraw

Split = Literal["train", "eval", "published"]
FAMILIES: dict[str, dict[str, Callable[[random.Random], TaskSpec]]] = {
    "core": {family: core(family, kinds) for family, kinds in CORE.items()},
    "hard": {"find": find, "config": config, "tally": tally, "shelf": shelf},
    "long": {"chain": chain, "layout": layout, "release": release},
    "swr": {"fields": flows.fields, "arrange": flows.arrange, "shapes": flows.shapes},
}
SALT = "held out 1250"  # with it every stage of a held-out workflow stands in one that is trained on
TRAIN_SHARE = 6  # of 10: the share of `core` and `hard` tasks that may be trained on
DOCKERFILE = "FROM debian:bookworm\nCOPY files/ /app/\nWORKDIR /app\n"


def split_of(spec: TaskSpec) -> Split:
    """The only split a task can be in: by (family, instruction, files), for long and swr by composition too."""
    if spec.suite in ("long", "swr"):
        if _hash(SALT, *spec.composition) % HELD_OUT:
            return "train"
        return "eval" if int(spec.name.rpartition("-")[2], 16) % 2 else "published"
    share = int(spec.name.rpartition("-")[2], 16) % 10
    return "train" if share < TRAIN_SHARE else "eval" if share < (10 + TRAIN_SHARE) // 2 else "published"


def draw(family: str, suite: str, rng: random.Random, split: Split) -> TaskSpec:
    """One task of `family` that belongs to `split`."""
    while True:
        try:
            spec = FAMILIES[suite][family](rng)
        except (Redraw, Unsupported):
            continue
        key = _hash(family, spec.instruction, *(f"{path}\n{text}" for path, text in sorted(spec.files.items())))
        spec = dataclasses.replace(spec, name=f"{family}-{key:012x}")
        if split_of(spec) == split:
            return spec


def families_of(suite: str, limit: int | None = None) -> list[str]:
    """Names of the suite's families, the first `limit` of them."""
    return list(FAMILIES[suite])[:limit]


def generate(split: Split, suite: str, count: int, seed: int, limit: int | None = None) -> list[TaskSpec]:
    """`count` different tasks, the suite's (first `limit`) families in turn; the same arguments give the same tasks.

    Raises:
        ValueError: for an unknown split or suite.
    """
    if split not in ("train", "eval", "published"):
        raise ValueError(f"split {split!r} is unknown: choose train, eval or published")
    if suite not in FAMILIES:
        raise ValueError(f"suite {suite!r} is unknown: choose one of {', '.join(FAMILIES)}")
    rng = random.Random(f"{split} {suite} {seed}")
    families = families_of(suite, limit)
    specs: dict[str, TaskSpec] = {}
    while len(specs) < count:
        spec = draw(families[len(specs) % len(families)], suite, rng, split)
        specs.setdefault(spec.name, spec)
    return list(specs.values())


def write_task(spec: TaskSpec, folder: Path) -> None:
    """Write the task into `folder`, in Harbor's format."""
    texts = {
        "task.toml": _settings(spec),
        "instruction.md": f"{spec.instruction}\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": spec.tests,
        "solution/solve.sh": spec.solution,
    } | {f"environment/files/{path}": text for path, text in spec.files.items()}
    for parent in {path.rpartition("/")[0] for path in texts}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")


def _settings(spec: TaskSpec) -> str:
    composition = ", ".join(f'"{part}"' for part in spec.composition)
    return f"""schema_version = "1.4"

[task]
name = "tiny/{spec.name}"

[metadata]
family = "{spec.family}"
suite = "{spec.suite}"
checks = {len(spec.checks)}
composition = [{composition}]

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 20.0

[environment]
network_mode = "no-network"
memory_mb = 256
"""


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=6).digest(), "big")
