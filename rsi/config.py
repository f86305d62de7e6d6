"""Every setting, its preset values, and the command line. Does not import torch.

A field's docstring is its help text. Batch-like numbers are global: attempts, tasks or tokens of one
optimizer step, whatever the number of processes.
"""

import contextlib
import dataclasses
import io
import itertools
import json
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
    detour: float = 1.0
    """Re-executions are kept up to this many times the turns of the success behind their runbook; inf: all."""
    keep: int = 2
    """Kept attempts a task, at most."""
    epochs: int = 3
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
    """Default values: "tiny" (the embedded model, minutes on two cores), "smoke" (a minute, no claim), or those of real
    checkpoints, "qwen3-0.6b", "qwen3-8b" and "qwen3.8-27b"."""
    init: str = ""
    """Checkpoint that base starts from: a Hugging Face folder, or hub:OWNER/NAME; none: the embedded model."""
    seed: int = 0
    rounds: int = 2
    """How often rsr and rpr alternate; a run may be given more later."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    name: str = ""
    """The run's name; by default preset and seed."""
    tasks: Path | None = None
    """Folder of your own tasks, {train,eval}/{core,hard,long,swr}/*/; none: built-in ones."""
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
                Config, default=PRESETS[preset](), args=list(arguments), prog=program, console_outputs=speaks
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(screen.getvalue(), program)) from None
    validate(config, PRESETS[preset]())
    return config


def preset_name(arguments: Sequence[str]) -> str:
    """The value of `--preset`, read ahead because it decides every default."""
    name = "tiny"
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument == "--preset":
            name = following
        elif argument.startswith("--preset="):
            name = argument.removeprefix("--preset=")
    return name


def one_line(text: str, program: str) -> str:
    """tyro's framed message as one line of words."""
    rows = (row.strip("│╭╰╮╯─ \t") for row in text.splitlines())
    words = " ".join(row for row in rows if row and not set(row) <= {"─"})
    for title in ("Parsing error", "Value error", "Error parsing", "Unrecognized options"):
        words = words.strip(" ─").removeprefix(title)
    for help_text in (" For full helptext", " Argument helptext"):
        words = words.split(help_text)[0]
    return f"{words.strip() or 'the command line cannot be read'} (see {program} --help)"


# Option -> the numbers it takes; without an entry whole ones from 1 and others above 0. With "inf]" inf is "no limit".
INTERVALS = {
    name: interval
    for interval, names in {
        "(-inf, inf)": "seed",
        "[0, 1]": "pretrain.habit pretrain.short_share rpr.gamma rpr.lam",
        "[0, 1)": "rpr.clip_low rpr.spr_failure",
        "[0, inf)": "pretrain.muon_lr pretrain.adamw_lr rsr.lr rpr.actor_lr rpr.actor_lr_later rpr.critic_lr"
        " rpr.steps rpr.calibration_steps rpr.kl_coefficient rpr.entropy_coefficient rpr.spr_bonus",
        "[0, inf]": "rpr.clip_high rpr.max_logprob_gap",
        "(0, inf]": "rsr.detour rpr.value_clip rpr.max_grad_norm",
        "(0, 1e6]": "timeout rollout.timeout",
        "(1, inf)": "rpr.dual_clip",
        "[1, 1000]": "rounds",
        "[1, 4096]": "threads rollout.threads rollout.workers",
        "[1, 65536]": "rollout.slots",
        "[2, inf)": "rollout.max_length",
        "[474, inf)": "model.vocab_size",  # of rsi.tiny.tokenizer: bytes, whole names, the harnesses' words
    }.items()
    for name in names.split()
}
WORDS = {"[1, inf)": "at least 1", "(0, inf)": "above 0", "[0, inf)": "at least 0"}


def validate(config: Config, preset: Config) -> None:
    """Refuse values that cannot work or would not count, naming field, value and what would be right."""
    from rsi.stages import schedule

    groups = {"": config, **{f"{name}.": getattr(config, name) for name in GROUPS}}
    for prefix, group in groups.items():
        for entry in dataclasses.fields(group):
            require_numbers(f"{prefix}{entry.name}", getattr(group, entry.name))
    names, harnesses = [stage.name for stage in schedule(config)], config.rsr.harnesses
    problems = {
        f"--stage {config.stage!r}: choose one of all, {', '.join(names)}": config.stage not in ("all", *names),
        f"--name {config.name!r}: must be the name of one folder": (
            config.name in (".", "..") or "/" in config.name or len(config.name) > 200
        ),
        f"--rpr.steps {config.rpr.steps}: needs at least one entry": not config.rpr.steps,
        f"--rsr.harnesses {' '.join(harnesses)}: must name terminus, bash or rsrt, each once": (
            not harnesses or not set(harnesses) <= {"terminus", "bash", "rsrt"} or len({*harnesses}) < len(harnesses)
        ),
        f"--tasks {config.tasks}: no such folder": config.tasks is not None and not config.tasks.is_dir(),
        f"--ranks {config.ranks}: for --dry-run alone; start processes with torchrun --nproc-per-node {config.ranks}": (
            config.ranks != 1 and not config.dry_run
        ),
    }
    for given, unused in (("init", "model"), ("init", "pretrain"), ("tasks", "train_tasks")):
        counts = not getattr(config, given) or getattr(config, unused) == getattr(preset, unused)
        problems[f"--{unused.replace('_', '-')} has no effect with --{given}: leave it out"] = not counts
    for problem, holds in problems.items():
        if holds:
            raise UserError(problem)


def require_numbers(name: str, value: object) -> None:
    """Raises UserError where a number of the option `name` is outside its interval."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        interval = INTERVALS.get(name, "[1, inf)" if isinstance(number, int) else "(0, inf)")
        least, most = map(float, interval[1:-1].split(","))
        bound = (number == least and interval[0] == "[") or (number == most and interval[-1] == "]")
        if not (least < number < most or bound):
            option = f"--{name}".replace("_", "-")
            raise UserError(f"{option} {number}: must be {WORDS.get(interval, f'within {interval}')}")


def to_record(config: Config) -> dict[str, object]:
    """The configuration as plain JSON types."""
    record: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return record


def from_record(record: dict[str, Any]) -> Config:
    """Inverse of `to_record`; an option that is newer than the record has its default."""

    def build(kind: type, values: dict[str, Any]) -> Any:
        known = {entry.name: values[entry.name] for entry in dataclasses.fields(kind) if entry.name in values}
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})

    groups = {name: build(type(getattr(Config(), name)), record[name]) for name in GROUPS if name in record}
    config: Config = build(Config, record | groups)
    return dataclasses.replace(config, runs=Path(config.runs), tasks=config.tasks and Path(config.tasks))


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
