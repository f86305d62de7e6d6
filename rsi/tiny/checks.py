"""A task's checks: decided here over files in memory, and in `tests/test.sh` over real ones.

The script uses bash builtins alone (no forks: thousands of attempts are verified on two cores), except
where it must run what the agent wrote.
"""

import json
from typing import NamedTuple

from rsi.tiny.shell import Outcome, Unsupported, World


class Same(NamedTuple):
    """`path` is a regular file whose whole text is `text`."""

    path: str
    text: str


class Has(NamedTuple):
    """`path` has the whole line `line`."""

    path: str
    line: str


class Gone(NamedTuple):
    """Nothing is at `path`."""

    path: str


class Runnable(NamedTuple):
    """`path` is an executable file."""

    path: str


class Entries(NamedTuple):
    """The working directory holds exactly `number` files and folders, at any depth."""

    number: int


class Flow(NamedTuple):
    """`bash <script>` turns `given` on its input into `wanted`."""

    script: str
    given: str
    wanted: str


Condition = Same | Has | Gone | Runnable | Entries | Flow


class Check(NamedTuple):
    """Passes when all its conditions hold; `hidden` ones are never named in the instruction."""

    name: str
    conditions: tuple[Condition, ...]
    hidden: bool = False


def passes(check: Check, world: World) -> bool:
    """Whether the check passes in `world`."""
    return all(_holds(condition, world) for condition in check.conditions)


def run_flow(script: str, given: str) -> Outcome:
    """Output of a one-line pipeline fed with `given`."""
    world = World({".given": given})
    first, _, rest = script.partition(" | ")
    for stage in [first, *(rest.split(" | ") if rest else [])]:
        outcome = world.run(f"{stage} < .given")
        world.files[".given"] = outcome.output
    return outcome


def _holds(condition: Condition, world: World) -> bool:
    match condition:
        case Same(path, text):
            return world.files.get(path) == text
        case Has(path, line):
            return f"\n{line}\n" in f"\n{world.files.get(path, '')}"
        case Gone(path):
            return path not in world.files and path not in world.dirs
        case Runnable(path):
            return path in world.executable
        case Entries(number):
            return len(world.files) + len(world.dirs) == number
        case Flow(script, given, wanted):
            try:
                return run_flow(world.files.get(script, "false").strip(), given).output == wanted
            except Unsupported:
                return False


HEAD = """#!/bin/bash
LC_ALL=C
shopt -s nullglob dotglob globstar
cd /app || exit 1
strict=1 report=
load() { text=; [[ -f $1 && ! -L $1 ]] && ! IFS= read -r -d '' text <"$1"; }
same() { load "$1" && [[ $text == "$2" ]]; }
has() { load "$1" && [[ $'\\n'$text == *$'\\n'"$2"$'\\n'* ]]; }
gone() { [[ ! -e $1 && ! -L $1 ]]; }
entries() { local all=(**); ((${#all[@]} == $1)); }
note() {
  local state=passed
  (($2 == 0)) || state=failed strict=0
  report+="${report:+,}{\\"name\\":\\"$1\\",\\"status\\":\\"$state\\"}"
}
"""
FLOW = """flow() {
  load "$1" || return
  if [[ $text == *[!a-z0-9:\\ \\|$'\\n'-]* || $text == *ex* ]]; then (. ./"$1"); else . ./"$1"; fi
}
"""
TAIL = """printf '{"results":{"tests":[%s]}}\\n' "$report" >/logs/verifier/ctrf.json
echo $strict >/logs/verifier/reward.txt
"""


def test_script(checks: tuple[Check, ...]) -> str:
    """`tests/test.sh`: decides every check, writes the report by name and the strict reward."""
    flows = [condition for check in checks for condition in check.conditions if isinstance(condition, Flow)]
    lines = [HEAD, _run_flows(flows)] if flows else [HEAD]
    for check in checks:
        tests = " && ".join(_bash(condition, flows) for condition in check.conditions)
        lines.append(f"{tests}; note {check.name} $?\n")
    return "".join([*lines, TAIL])


def _run_flows(flows: list[Flow]) -> str:
    # A plain pipeline is sourced as it stands; anything else in a subshell of its own. No bash is started
    # again, and the wait is bounded by `read`: starting processes is what a verification costs.
    inputs = "".join(f"printf %s {quote(flow.given)} >/tmp/{number}.in\n" for number, flow in enumerate(flows))
    runs = "".join(
        f"  flow {flow.script} </tmp/{number}.in >/tmp/{number}.out 2>/dev/null\n" for number, flow in enumerate(flows)
    )
    return f"{FLOW}{inputs}read -r -t 5 < <(\n{runs}  echo\n)\nkill $! 2>/dev/null\n"


def _bash(condition: Condition, flows: list[Flow]) -> str:
    match condition:
        case Same(path, text):
            return f"same {path} {quote(text)}"
        case Has(path, line):
            return f"has {path} {quote(line)}"
        case Gone(path):
            return f"gone {path}"
        case Runnable(path):
            return f"[[ -f {path} && -x {path} ]]"
        case Entries(number):
            return f"entries {number}"
        case Flow(_, _, wanted):
            return f"same /tmp/{flows.index(condition)}.out {quote(wanted)}"


def quote(text: str) -> str:
    """`text` as one word of bash; JSON's escapes of ASCII text are bash's."""
    return "$'" + json.dumps(text)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
