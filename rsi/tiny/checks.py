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
    for stage in script.split(" | "):
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
LC_ALL=C PATH=/usr/bin:/bin
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
# What the agent wrote runs where it can neither read the tests nor write the verdict, in a bash of its own: a forked
# one would still hold the test script, and the answers in it, in its memory. Where there are several users it is
# another one. Where only one is mapped (a user namespace) it is the same one, without capabilities, on a read-only
# tree with a private /tmp and a copy of /app, in a process namespace that dies with it.
CONFINED = r"""confined() {
  local uids
  read -r _ _ uids </proc/self/uid_map
  export HOME=/tmp
  if ((uids > 1)); then
    chown -R 65534:65534 /app && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
  else
    exec unshare --mount --pid --fork --kill-child bash -c 'mount -t tmpfs -o size=64m,mode=1777 none /tmp &&
      cp -r /app /tmp/app && mount --bind /tmp/app /app && mount -o remount,bind,ro / && cd /app &&
      exec setpriv --bounding-set=-all --inh-caps=-all "$@"' bash "$@"
  fi
}
flows() {
  local frame outputs
  chmod 0 /tests /logs/verifier || return
  exec {outputs}< <(confined bash -c 'while (($#)); do
    printf %s "$2" >/tmp/.given; (. "./$1") </tmp/.given 2>/dev/null; printf "\\0"; shift 2
  done; printf "end\\0"' bash "$@")
  SECONDS=0
  while ((SECONDS < 5)) && IFS= read -r -d '' -t $((5 - SECONDS)) -u $outputs frame; do
    got+=("$frame")
    (($# / 2 < ${#got[@]})) && break
  done
  kill -9 $! 2>/dev/null
  (($# / 2 >= ${#got[@]})) || [[ $frame == end ]] || got=()
}
"""
TAIL = """printf '{"results":{"tests":[%s]}}\\n' "$report" >/logs/verifier/ctrf.json
echo $strict >/logs/verifier/reward.txt
"""


def test_script(checks: tuple[Check, ...]) -> str:
    """`tests/test.sh`: decides every check, writes the report by name and the strict reward."""
    flows = [condition for check in checks for condition in check.conditions if isinstance(condition, Flow)]
    if not flows:
        return "".join([HEAD, *(f"{_plain(check)}; note {check.name} $?\n" for check in checks), TAIL])
    # Files are looked at before anything the agent wrote runs.
    before = "".join(f"{_plain(check)}; plain+=($?)\n" for check in checks)
    pairs = " \\\n  ".join(f"{flow.script} {quote(flow.given)}" for flow in flows)
    after = []
    for number, check in enumerate(checks):
        wanted = [
            f"[[ -v got[{flows.index(c)}] && ${{got[{flows.index(c)}]}} == {quote(c.wanted)} ]]"
            for c in check.conditions
            if isinstance(c, Flow)
        ]
        after.append(" && ".join([f"((plain[{number}] == 0))", *wanted]) + f"; note {check.name} $?\n")
    return "".join([HEAD, CONFINED, "plain=() got=()\n", before, f"flows {pairs}\n", *after, TAIL])


def _plain(check: Check) -> str:
    return " && ".join(_bash(c) for c in check.conditions if not isinstance(c, Flow)) or "true"


def _bash(condition: Same | Has | Gone | Runnable | Entries) -> str:
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


def quote(text: str) -> str:
    """`text` as one word of bash; JSON's escapes of ASCII text are bash's."""
    return "$'" + json.dumps(text)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
