"""The schedule as data."""

from rsi.config import parse
from rsi.stages import missing_before, schedule


def test_the_five_stages() -> None:
    stages = schedule(parse([]))
    assert [(stage.name, stage.source, stage.critic, stage.reward) for stage in stages] == [
        ("base", "", "none", ""),
        ("rsr1", "base", "none", ""),
        ("rpr1", "rsr1", "create", "fdr"),
        ("rsr2", "rpr1", "pass", ""),
        ("rpr2", "rsr2", "inherit", "spr"),
    ]


def test_a_longer_recursion_and_the_branch_are_a_longer_list() -> None:
    names = [stage.name for stage in schedule(parse(["--rounds", "3", "--rpr.fdr-branch"]))]
    assert names == ["base", "rsr1", "rpr1", "rsr2", "rpr2-fdr", "rpr2", "rsr3", "rpr3-fdr", "rpr3"]
    by_name = {stage.name: stage for stage in schedule(parse(["--rounds", "3", "--rpr.fdr-branch"]))}
    assert by_name["rsr3"].source == "rpr2" and by_name["rpr2-fdr"].reward == "fdr"
    assert "rpr2-fdr" not in {stage.source for stage in by_name.values()}


def test_a_stage_brings_the_missing_ones_before_it() -> None:
    config = parse(["--stage", "rpr1", "--rpr.fdr-branch"])
    assert [stage.name for stage in missing_before(config, set())] == ["base", "rsr1", "rpr1"]
    assert [stage.name for stage in missing_before(config, {"base", "rsr1"})] == ["rpr1"]
    assert missing_before(config, {"base", "rsr1", "rpr1"}) == []
