"""Every setting, its preset values, and the command line. Does not import torch.

A field's docstring is its help text. Batch-like numbers are global: attempts, tasks or tokens of one
optimizer step, whatever the number of processes.
"""

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

SUITES = ("core", "hard", "long", "swr")
GROUPS = ("model", "pretrain", "rollout", "evaluate", "rsr", "rpr")


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""


@dataclass(frozen=True)
class ModelShape:
    """The embedded model (Qwen3 architecture), built and pretrained here."""

    vocab_size: int = 1024
    """Upper bound on the byte-level BPE's size."""
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384


@dataclass(frozen=True)
class Pretrain:
    """Base stage: learn to act, by habit often wrongly, from synthetic transcripts."""

    steps: int = 480
    batch: int = 32
    """Transcripts a step."""
    habit: float = 1.0
    """How often a habit wins over the right command: 1 as in rsi.tiny.habits, 0 never."""
    short_share: float = 0.25
    """Share of the steps, the first ones, on the suites with short tasks alone: names are copied sooner."""
    muon_lr: float = 0.01
    """For the block matrices."""
    adamw_lr: float = 3e-3
    """For embeddings and norms."""


@dataclass(frozen=True)
class Rollout:
    """How attempts are made."""

    slots: int = 128
    """Attempts that sample together, on all ranks."""
    workers: int = 8
    """Threads of one rank that drive sandboxes."""
    lockstep: bool = True
    """All sample, then all run their commands: the same numbers in every run on a CPU. Without it nobody waits for the
    slow, and with who happens to share a batch log-probs vary in their last digits."""
    threads: int = 1
    """CPU threads that sampling uses; the sandboxes want the others."""
    max_length: int = 512
    """Tokens of one attempt, prompt included."""
    max_turns: int = 10
    max_turn_tokens: int = 28
    temperature: float = 1.0
    """Of discovery, training and sampled evaluation alike."""
    command_timeout: float = 10.0
    """Seconds one command may take."""
    timeout: float = 360.0
    """Minutes that the first rank with its attempts made waits for the last one."""
    prompt_style: Literal["brief", "full"] = "brief"
    """Whether the system prompt names the harness's protocol or explains it."""
    thinking: bool = False
    """Ask a checkpoint that can think before it answers to do so."""


@dataclass(frozen=True)
class Evaluate:
    """The evaluation at the end of every stage."""

    tasks: int = 60
    """Tasks a suite."""
    greedy: bool = True
    """Evaluate greedily beside sampling."""


@dataclass(frozen=True)
class Rsr:
    """Recursive self-rewrite: discover, write runbooks, re-execute, screen, train the actor."""

    tasks: int = 100
    """Training tasks a suite for discovery."""
    samples: int = 1
    """Attempts a task in each discovery harness."""
    harnesses: tuple[str, ...] = ("terminus", "bash", "rsrt")
    runbooks: int = 1
    """Runbooks a solved task."""
    executions: int = 2
    """Re-executions of a runbook in the target harness."""
    keep: int = 2
    """Kept attempts a task, at most."""
    epochs: int = 2
    """Over the kept attempts."""
    batch: int = 64
    """Attempts an optimizer step."""
    lr: float = 4e-4


@dataclass(frozen=True)
class Rpr:
    """Recursive policy refinement: PPO with a critic."""

    warmup_batch: int = 64
    """Attempts a critic warm-up step; the warm-up is one epoch over the swr training tasks."""
    calibration_steps: int = 4
    """Critic-only steps before the actor moves."""
    critic_only_epochs: int = 4
    """Passes over the attempts of a step in which the actor is frozen: warm-up and calibration."""
    steps: tuple[int, ...] = (26, 26)
    """Joint steps of rpr1, rpr2, …; the last entry holds for longer recursions."""
    attempts: int = 128
    """Attempts a step, one a task."""
    minibatches: int = 2
    epochs: int = 1
    """Passes over a step's attempts; updates a step = epochs × minibatches."""
    actor_lr: float = 5e-4
    """Of rpr1."""
    actor_lr_later: float = 1e-4
    """Of rpr2 and later: five times lower, as published."""
    critic_lr: float = 1e-3
    gamma: float = 0.99
    """Discount across a turn boundary."""
    lam: float = 0.95
    """Trace decay across a turn boundary."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float = 0.2
    dual_clip: float | None = None
    """Bound (> 1) on the loss of a negative advantage; none: no bound."""
    kl_coefficient: float = 0.1
    """Of a KL penalty to the stage's first actor; 0: none. Without it the noise of many short tasks undoes what
    the long ones need: copying a name right ten times in a row."""
    entropy_coefficient: float = 0.0
    importance_cap: float | None = None
    """Cap of token-level importance weights trainer/sampler; none: no weights."""
    whiten: bool = False
    """Whiten advantages over the step's action tokens."""
    max_grad_norm: float = 1.0
    max_logprob_gap: float = 0.1
    """Mean difference between sampler's and trainer's log-probs, in nats, above which the run stops."""
    fdr_cap: float = 1.0
    spr_failure: float = 0.5
    """c of the success-prioritised reward: a failure earns c·min(FDR, 1) < 1."""
    spr_bonus: float = 0.0
    fdr_branch: bool = False
    """Run rpr2 with the FDR reward too, as stage rpr2-fdr beside the kept SPR branch."""
    control: Literal["none", "zero_advantages", "shuffled_rewards"] = "none"
    """A control experiment: advantages set to 0, or rewards shuffled among a step's attempts."""


@dataclass(frozen=True)
class Config:
    """Terminal-RSI: base → rsr1 → rpr1 → rsr2 → rpr2."""

    stage: str = "all"
    """Stage to end with (the missing ones before it run first), or "all"."""
    preset: str = "tiny"
    """Default values: "tiny" (the embedded model, minutes on two cores), "smoke" (seconds, no claim), or a real
    checkpoint: "qwen3-0.6b", "qwen3-8b", "qwen3.8-27b"."""
    init: str = ""
    """Checkpoint that base starts from: a Hugging Face folder, or hub:OWNER/NAME; none: the embedded model."""
    seed: int = 0
    rounds: int = 2
    """How often rsr and rpr alternate."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    name: str = ""
    """The run's name; by default preset and seed."""
    tasks: Path | None = None
    """Folder of your own tasks, {train,eval}/{core,hard,long,swr}/*/task.toml; default: built-in ones."""
    train_tasks: int = 640
    """Built-in training tasks a suite."""
    families: int | None = None
    """Built-in families a suite; none: all."""
    sandbox: Literal["local", "docker", "auto"] = "local"
    """Where commands run and verifiers judge."""
    threads: int = 2
    """CPU threads of the trainer, shared by the ranks of one machine."""
    micro_batch_tokens: int = 2048
    """Tokens of one forward and backward pass of one rank; a longer attempt makes a pass of its own."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's passes; weights, moments and reductions are float32."""
    recompute: bool = False
    """Keep only the layers' inputs for the backward pass and compute the rest again."""
    offload: bool = False
    """Keep weights and moments in the CPU's memory between their uses."""
    save_every: int = 5
    """Training steps between two saved positions; a killed run goes on from the last one."""
    timeout: float = 10.0
    """Minutes that a rank waits for the others in one collective before it calls that an error."""
    rank_gib: float | None = None
    """GiB of memory that a rank may need; none: what its GPU has, or its share of this machine's."""
    dry_run: bool = False
    """Print the plan and stop."""
    ranks: int = 1
    """Processes whose memory --dry-run plans."""
    model: ModelShape = field(default_factory=ModelShape)
    pretrain: Pretrain = field(default_factory=Pretrain)
    rollout: Rollout = field(default_factory=Rollout)
    evaluate: Evaluate = field(default_factory=Evaluate)
    rsr: Rsr = field(default_factory=Rsr)
    rpr: Rpr = field(default_factory=Rpr)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.runs / (self.name or f"{self.preset}-{self.seed}")

    def share(self, ranks: int) -> str:
        """What the global numbers come to for each of `ranks` ranks."""
        return (
            f"each rank samples in {self.rank_slots(ranks)} slots, makes up to {-(-self.rpr.attempts // ranks)} of a"
            f" step's {self.rpr.attempts} attempts and passes at most {self.micro_batch_tokens} tokens at a time"
        )

    def rank_slots(self, ranks: int) -> int:
        """Sampler slots of each of `ranks` ranks."""
        return -(-self.rollout.slots // ranks)


def tiny() -> Config:
    """The embedded default: all five stages in minutes on two CPU cores."""
    return Config()


def smoke() -> Config:
    """All five stages in under a minute: every part runs, nothing is claimed to be learnt."""
    return Config(
        preset="smoke",
        train_tasks=32,
        families=2,
        model=ModelShape(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=192),
        pretrain=Pretrain(steps=350, habit=0.3, short_share=1.0),
        rollout=Rollout(slots=32, max_turns=5, max_turn_tokens=20, max_length=256),
        evaluate=Evaluate(tasks=6),
        rsr=Rsr(tasks=8, executions=1),
        rpr=Rpr(warmup_batch=8, calibration_steps=4, steps=(4, 2), attempts=32, critic_lr=3e-3),
    )


# What may differ between two invocations on one run folder: where to stop, not what is computed.
FREE = ("stage", "dry_run", "ranks", "rank_gib", "runs", "name", "save_every", "timeout", "rollout.timeout")


def parse(arguments: Sequence[str], program: str = "rsi.train") -> Config:
    """The configuration that `arguments` ask for; a wrong one ends in one line and exit code 2."""
    from rsi.presets import PRESETS

    preset = preset_name(arguments)
    if preset not in PRESETS:
        raise UserError(f"--preset {preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    # Under torchrun every rank parses; one of them speaks.
    speaks = os.environ.get("RANK", "0") == "0"
    help_asked = any(argument in ("-h", "--help") for argument in arguments)
    screen = io.StringIO()
    try:
        with contextlib.nullcontext() if help_asked else contextlib.redirect_stderr(screen):
            config = tyro.cli(
                Config,
                default=PRESETS[preset](),
                args=list(arguments),
                prog=program,
                console_outputs=speaks,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(screen.getvalue(), program)) from None
    validate(config)
    return config


def preset_name(arguments: Sequence[str]) -> str:
    """The value of `--preset`, read ahead because it decides every default."""
    for position, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset=")
        if argument == "--preset":
            return arguments[position + 1] if position + 1 < len(arguments) else ""
    return "tiny"


def one_line(text: str, program: str) -> str:
    """tyro's framed message as one line of words."""
    rows = (row.strip("│╭╰╮╯─ \t") for row in text.splitlines())
    words = " ".join(row for row in rows if row and not set(row) <= {"─"})
    words = words.removeprefix("Parsing error").removeprefix("Unrecognized options").strip(" ─")
    return f"{words or 'the command line cannot be read'}".split(" For full helptext")[0] + f" (see {program} --help)"


def validate(config: Config) -> None:
    """Refuse values that cannot work, naming field, value and what would be right."""
    from rsi.stages import stage_names

    names = stage_names(config)
    problems = {
        f"--stage {config.stage!r}: choose one of all, {', '.join(names)}": config.stage not in ("all", *names),
        f"--rounds {config.rounds}: must be at least 1": config.rounds < 1,
        f"--rpr.steps {config.rpr.steps}: needs at least one entry": not config.rpr.steps,
        f"--rpr.spr-failure {config.rpr.spr_failure}: must be in [0, 1)": not 0 <= config.rpr.spr_failure < 1,
        f"--rpr.spr-bonus {config.rpr.spr_bonus}: must not be negative": config.rpr.spr_bonus < 0,
        f"--rollout.temperature {config.rollout.temperature}: must be above 0": config.rollout.temperature <= 0,
        f"--timeout {config.timeout}: must be above 0": config.timeout <= 0,
        f"--rollout.timeout {config.rollout.timeout}: must be above 0": config.rollout.timeout <= 0,
        f"--rsr.harnesses {config.rsr.harnesses}: must name terminus, bash or rsrt": (
            not config.rsr.harnesses or not set(config.rsr.harnesses) <= {"terminus", "bash", "rsrt"}
        ),
        f"--tasks {config.tasks}: no such folder": config.tasks is not None and not config.tasks.is_dir(),
    }
    groups = {"": config, **{f"{name}.": getattr(config, name) for name in GROUPS}}
    for prefix, group in groups.items():
        for entry in dataclasses.fields(group):
            value = getattr(group, entry.name)
            counts = entry.type is int and entry.name not in ("seed", "steps", "calibration_steps")
            option = f"--{prefix}{entry.name}".replace("_", "-")
            problems[f"{option} {value}: must be at least 1"] = counts and value < 1
    for problem, holds in problems.items():
        if holds:
            raise UserError(problem)


def to_record(config: Config) -> dict[str, object]:
    """The configuration as plain JSON types."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, (tuple, list)):
            return [plain(entry) for entry in value]
        return str(value) if isinstance(value, Path) else value

    record = plain(dataclasses.asdict(config))
    assert isinstance(record, dict)
    return record


def from_record(record: dict[str, Any]) -> Config:
    """Inverse of `to_record`; an option that is newer than the record has its default."""

    def build(kind: type, values: dict[str, Any]) -> Any:
        built = {}
        for entry in dataclasses.fields(kind):
            if entry.name not in values:
                continue
            value = values[entry.name]
            if entry.name in GROUPS:
                value = build(type(getattr(Config(), entry.name)), value)
            elif isinstance(value, list):
                value = tuple(value)
            elif kind is Config and entry.name in ("runs", "tasks") and value is not None:
                value = Path(value)
            built[entry.name] = value
        return kind(**built)

    config = build(Config, record)
    assert isinstance(config, Config)
    return config


def differences(old: dict[str, object], new: dict[str, object], prefix: str = "") -> list[str]:
    """The keys (dotted, with both values) in which two records differ, `FREE` ones apart."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        if f"{prefix}{key}" in FREE:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} ({before} → {after})")
    return found


def fail(problem: Exception) -> None:
    """Print the one line and leave with exit code 2; only the first rank speaks, but for what it alone has met."""
    if os.environ.get("RANK", "0") == "0" or isinstance(problem, OSError):
        print(f"rsi: error: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)
