"""The schedule: which stages there are, in which order, and who hands which weights to whom."""

from dataclasses import dataclass
from typing import Literal

from rsi.config import Config


@dataclass(frozen=True)
class Stage:
    """One stage; `Stage("rpr2", "rpr", round=2, source="rsr2", critic="inherit", reward="spr")`.

    `source` names the stage whose weights it starts from ("" for base). `critic`: "none" (there is
    none yet), "create" (from the actor's weights, then warmed up), "inherit" (weights kept, fresh
    optimizer) or "pass" (copied bit for bit, untouched).
    """

    name: str
    kind: Literal["base", "rsr", "rpr"]
    round: int = 0
    source: str = ""
    critic: Literal["none", "create", "inherit", "pass"] = "none"
    reward: Literal["", "fdr", "spr"] = ""


def schedule(config: Config) -> list[Stage]:
    """base, then rsr and rpr in turn; the first rpr is rewarded by FDR, later ones by SPR.

    With `rpr.fdr_branch` a stage "rprN-fdr" stands beside each SPR stage; nothing starts from it.
    """
    stages = [Stage("base", "base"), Stage("rsr1", "rsr", 1, "base"), Stage("rpr1", "rpr", 1, "rsr1", "create", "fdr")]
    for number in range(2, config.rounds + 1):
        rsr, rpr = f"rsr{number}", f"rpr{number}"
        stages.append(Stage(rsr, "rsr", number, f"rpr{number - 1}", "pass"))
        if config.rpr.fdr_branch:
            stages.append(Stage(f"{rpr}-fdr", "rpr", number, rsr, "inherit", "fdr"))
        stages.append(Stage(rpr, "rpr", number, rsr, "inherit", "spr"))
    return stages


def missing_before(config: Config, done: set[str]) -> list[Stage]:
    """What has to run, in order, until `config.stage` is done."""
    stages = schedule(config)
    if config.stage != "all":
        sources = {stage.name: stage.source for stage in stages}
        needed, name = set[str](), config.stage
        while name:
            needed.add(name)
            name = sources[name]
        stages = [stage for stage in stages if stage.name in needed]
    return [stage for stage in stages if stage.name not in done]
