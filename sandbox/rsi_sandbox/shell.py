"""The persistent shell both backends talk to, over one stream each way.

The host sends `C <number> <length>`, the command's bytes and `N <nonce>`; the shell evals the command and
reads the nonce only afterwards, to print it with the exit status. So an unclosed quote or heredoc ends with
its command, and output cannot forge the end: the nonce is random and still unread while the command runs.
"""

import codecs
import os
import re
import secrets
import select
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, Self

from .records import FLOOD_BYTES, OUTPUT_BYTES, File, Result, SandboxError
from .task import Healthcheck

if TYPE_CHECKING:
    from .interface import Sandbox

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL = ("/bin/bash", "--noprofile", "--norc", "-c")
RESTARTED = "[the shell ended with status {}; a new one was started]"
_START_SECONDS = 30.0
# Seconds given to the shell, then what is tried: it may have begun one more process while its others were killed.
_GRACE = ((0.2, "command"), (3.0, "restart"), (_START_SECONDS, None))

# One line, so that bash's messages say "line 1". USR2 ends the running command and keeps the state: it leaves functions
# (one a signal) and loops, the driver's own included, which then begins again. Between commands it is ignored, so that
# one that comes late hits nothing. `jobs` (into /dev/null) keeps "Killed" notices, which name process ids, out of the
# next command's output.
_DRIVER = (
    '__rsi_i=; while IFS=" " builtin read -r -u 250 __rsi_k __rsi_a __rsi_b; do if [[ $__rsi_k == [CF] ]]; then '
    'LC_ALL=C builtin read -r -N "$__rsi_b" -u 250 __rsi_c; builtin jobs; builtin trap "__rsi_i=1; '
    '((\\${#FUNCNAME[@]})) && builtin return 130; builtin break 99" USR2; '
    "if [[ $__rsi_k == C ]]; then export RSI_COMMAND=$__rsi_a; "
    'builtin eval "$__rsi_c" </dev/null >&251 2>&1 250<&- 251>&-; '
    "else (builtin cd @WORKDIR; exec -c /bin/bash --noprofile --norc -c "
    '"export HOME=${__rsi_h@Q} @EXPORTS RSI_COMMAND=$__rsi_a; eval \\"\\$1\\"" bash "$__rsi_c") '
    '</dev/null >&251 2>&1 250<&- 251>&-; fi; __rsi_s=$? __rsi_x=; builtin trap "" USR2; '
    'else IFS=" " builtin read -r __rsi_t __rsi_b </proc/uptime; '
    'builtin printf \'\\036%s %d %d %s%s\\036\' "$__rsi_a" "$__rsi_s" $$ "${__rsi_t/./}" '
    '"$__rsi_x" >&251; fi; done; builtin trap "" USR2; '
    'if [[ -n $__rsi_i ]]; then __rsi_s=130 __rsi_x=; builtin eval "$__rsi_d"; fi; kill -USR1 $PPID; exit 0'
)

# Runs as root inside the sandbox, builtins only: it must work where no process can be started.
KILL = r"""
mode=$1 marker=$2 since=$3 shell=$4
signal=STOP  # first, so that none goes on when its child is killed
while (( SECONDS < 30 )); do  # what was killed takes its time to die on a busy machine
  found=0
  [[ $mode == command ]] && kill -USR2 $shell 2>/dev/null
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    (( p == 1 || p == $$ )) && continue
    { IFS= read -r -d '' s <$d/stat; } 2>/dev/null
    [[ $s ]] || continue
    set -- ${s##*) }
    state=$1 parent=$2 start=${20}
    [[ $state == [ZX] ]] && continue
    if [[ $mode == restart ]]; then
      { mapfile -d '' line <$d/cmdline; } 2>/dev/null
      [[ $p == $shell || ( $parent == 1 && ${line[4]} == *__rsi_d=* ) ]] && kill -KILL $p
      continue
    fi
    (( p == shell )) && continue
    mark=
    { while IFS= read -r -d '' v; do [[ $v == RSI_COMMAND=* ]] && mark=${v#*=}; done <$d/environ; } 2>/dev/null
    if [[ $mark == "$marker" || -z $mark && $start -ge $since ]]; then
      kill -$signal $p && found=1
    fi
  done
  (( found )) || exit 0
  signal=KILL
done
exit 1
"""

FREEZE = r"""
clean=0
while (( SECONDS < 30 )); do
  moving=0
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    (( p == 1 || p == $$ )) && continue
    s=
    { IFS= read -r -d '' s <$d/stat; } 2>/dev/null
    [[ $s ]] || continue
    s=${s##*) }
    [[ $s == [TtZX]* ]] && continue
    kill -STOP $p && moving=1
  done
  if (( moving )); then clean=0; else (( ++clean == 2 )) && exit 0; fi
done
exit 1
"""

THAW = "for d in /proc/[0-9]*; do p=${d#/proc/}; (( p == 1 || p == $$ )) || kill -CONT $p; done 2>/dev/null; exit 0"

_MARK = re.compile(rb" (\d+) (\d+) (\d+)( x)?\x1e")
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC with their text
    r"|\x1b[ -/]*[0-~]?"  # other escapes, and the opening of an unterminated one
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)


def clean(text: str) -> str:
    """Text without terminal control sequences; a carriage return becomes a newline."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def exports(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())


def driver(workdir: str, environment: Mapping[str, str]) -> str:
    """The script of the agent's shell; its one argument is how the shell before it ended."""
    fresh = exports(environment).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    loop = _DRIVER.replace("@WORKDIR", shlex.quote(workdir)).replace("@EXPORTS", fresh)
    return (
        'exec 250<&0 251>&1 </dev/null >/dev/null 2>&1; trap "" USR2; __rsi_h=$HOME __rsi_s=$1 __rsi_x=" x"; shift; '
        f'__rsi_d={shlex.quote(loop)}; builtin eval "$__rsi_d"'
    )


def environment(variables: Mapping[str, str], home: str) -> dict[str, str]:
    """The environment of every process in a sandbox: fixed values, then the task's own. Where `home` is empty it is
    the user's own, as docker sets it.
    """
    fixed = {"PATH": PATH, "LC_ALL": "C", "TERM": "dumb", "TZ": "UTC", "PAGER": "cat"} | (
        {"HOME": home} if home else {}
    )
    return fixed | {"DEBIAN_FRONTEND": "noninteractive"} | dict(variables)


class Output:
    """Keeps the head and the tail of a byte stream within `limit` bytes, whatever its length."""

    def __init__(self, limit: int = OUTPUT_BYTES):
        self.limit = limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.limit // 2 - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 4 * self.limit:
            del self.tail[: -self.limit]

    def text(self) -> tuple[str, int]:
        """(clean text with the cut marked, bytes dropped)."""
        keep = self.limit - self.limit // 2
        tail = bytes(self.tail[-keep:])
        dropped = self.total - len(self.head) - len(tail)
        if not dropped:
            return clean(bytes(self.head + tail).decode(errors="replace")), 0
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.head))
        whole = next((i for i in range(4) if tail[i : i + 1] and tail[i] & 0xC0 != 0x80), 0)
        note = f"\n[{dropped + whole} bytes of {self.total} omitted]\n"
        return clean(head) + note + clean(tail[whole:].decode(errors="replace")), dropped + whole


# What programs say, or the status they end with, when something has run out. It is believed only where the sandbox
# confirms it.
_SIGNS = {
    "memory": re.compile(r"[Cc]annot allocate memory|[Oo]ut of memory|memory exhausted|MemoryError|std::bad_alloc"),
    "processes": re.compile(r"fork: (retry: )?Resource temporarily unavailable|[Cc]annot fork|can't start new thread"),
    "disk": re.compile(r"No space left on device|Disk quota exceeded|File size limit exceeded|File too large"),
}


class Machine(Protocol):
    """What both kinds of sandbox give their shell, and what they share. All methods raise SandboxError when the sandbox
    is dead. `shell` is set by `begin`, never in a verifier's sandbox.
    """

    shell: "Shell | None"

    def send(self, data: bytes, deadline: float) -> None:
        """Write to the shell's input; raises TimeoutError at the deadline."""

    def receive(self, seconds: float) -> bytes:
        """What has arrived, waiting at most `seconds`; empty when nothing did."""

    def script(self, text: str, *arguments: str) -> int:
        """Exit status of a bash script run beside the agent's processes, by one who may kill them."""

    def exhausted(self, suspected: set[str]) -> tuple[str, ...]:
        """Which of the suspected resources ("memory", "processes", "disk") did run out."""

    def put(self, file: File) -> None:
        """Write the file, making its directories."""

    def fetch(self, path: str, limit: int) -> bytes | None:
        """Up to `limit` bytes of a regular file, or None."""

    def close(self) -> None: ...

    def run(self, command: str, timeout: float = 30.0, fresh: bool = False) -> Result:
        assert self.shell, "a verifier's sandbox has no shell"
        return self.shell.run(command, timeout, fresh)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        data = self.fetch(path, limit)
        if data is None:
            raise FileNotFoundError(f"{path}: no regular file in the sandbox")
        return data

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not an absolute path: write /app/{path}")
        self.put(File(path, data, mode, int(time.time())))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_all(descriptor: int, data: bytes, deadline: float, witness: int = -1) -> None:
    """Write to a descriptor that does not block, until the deadline; the end of `witness`'s stream means death."""
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    if witness >= 0:
        room.register(witness, 0)
    view = memoryview(data)
    while view:
        events = dict(room.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not events:
            raise TimeoutError
        try:
            if witness in events:
                raise BrokenPipeError
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise SandboxError(f"the sandbox is dead ({error!r})") from None


class Shell:
    """Runs commands in the driver at the other end of the machine's two streams."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.number = 0
        self.process = 0  # the shell's process id inside the sandbox
        self.offset = 0  # clock ticks since boot in the sandbox, less ours
        deadline = time.monotonic() + _START_SECONDS
        end = self._greet(deadline)
        heard = b""
        while end.status is None:
            if time.monotonic() > deadline:
                raise SandboxError(f"the shell did not start; it said {heard[-500:]!r}")
            heard += end.feed(machine.receive(deadline - time.monotonic()))
        self._learn(end)

    def _greet(self, deadline: float) -> "_End":
        """Ask for an end mark alone. What a shell before may have left unread of its last line ends here."""
        end = _End(secrets.token_hex(16).encode())
        try:
            self.machine.send(b"\nN %b\n" % end.nonce, deadline)
        except TimeoutError:
            raise SandboxError("the shell takes no input") from None
        return end

    def run(self, command: str, timeout: float, fresh: bool) -> Result:
        self.number += 1
        nonce = secrets.token_hex(16).encode()
        data = command.replace("\0", "").encode(errors="surrogateescape")
        kind = b"F" if fresh else b"C"
        request = b"%b %d %d\n%bN %b\n" % (kind, self.number, len(data), data, nonce)
        begun = time.monotonic()
        collected = Output()
        end = _End(nonce)
        limit = "timeout"
        deadline = begun + timeout
        try:
            self.machine.send(request, deadline)
            while (remaining := deadline - time.monotonic()) > 0:
                collected.feed(end.feed(self.machine.receive(remaining)))
                if end.status is not None:
                    self._learn(end)
                    text, dropped = collected.text()
                    if end.restarted:
                        text += ("\n" if text and not text.endswith("\n") else "") + RESTARTED.format(end.status) + "\n"
                    return Result(text, end.status, None, dropped, self._exhausted(text, end.status))
                if collected.total > FLOOD_BYTES:
                    limit = "output"
                    break
        except TimeoutError:
            pass
        collected.feed(end.rest())
        text, dropped = collected.text()
        self._stop(end, begun)
        return Result(text, None, limit, dropped, self._exhausted(text, None))

    def _exhausted(self, text: str, status: int | None) -> tuple[str, ...]:
        suspected = {name for name, sign in _SIGNS.items() if sign.search(text)}
        suspected |= {"memory"} if status == 137 else set()
        certain = ("disk",) if status == 153 else ()  # the signal for a file above its size limit
        return certain or (self.machine.exhausted(suspected) if suspected else ())

    def _learn(self, end: "_End") -> None:
        self.process = end.process
        self.offset = end.ticks - int(time.monotonic() * 100)

    def _stop(self, end: "_End", begun: float) -> None:
        """Kill the running command's processes and bring the shell back, its state kept where that is possible."""
        since = int(begun * 100) + self.offset - 1

        def kill(mode: str) -> None:
            if self.machine.script(KILL, mode, str(self.number), str(since), str(self.process)):
                raise SandboxError("the processes of a timed-out command could not be killed")

        kill("command")
        for grace, action in _GRACE:
            deadline = time.monotonic() + grace
            while (remaining := deadline - time.monotonic()) > 0:
                end.feed(self.machine.receive(remaining))
                if end.status is not None:
                    self._learn(end)
                    return
            if action:
                kill(action)
            if action == "restart":  # the old shell may have read the old nonce
                end = self._greet(time.monotonic() + grace)
        raise SandboxError("the shell does not answer after a timed-out command")


class _End:
    """Finds the end mark of one command in its output, keeping back only what could be the mark's beginning."""

    def __init__(self, nonce: bytes):
        self.nonce = nonce
        self.start = b"\x1e" + nonce
        self.pending = b""
        self.status: int | None = None
        self.process = 0
        self.ticks = 0
        self.restarted = False

    def feed(self, data: bytes) -> bytes:
        """The part of the output known not to belong to the mark."""
        data = self.pending + data
        at = data.find(self.start)
        if at < 0:
            at = data.rfind(b"\x1e", -len(self.start))
            at = at if at >= 0 and self.start.startswith(data[at : at + len(self.start)]) else len(data)
            self.pending = data[at:]
            return data[:at]
        found = _MARK.match(data, at + len(self.start))
        if found:
            self.status, self.process, self.ticks = (int(found[i]) for i in (1, 2, 3))
            self.restarted = bool(found[4])
        self.pending = data[at:]
        return data[:at]

    def rest(self) -> bytes:
        return b"" if self.status is not None or self.pending.startswith(self.start) else self.pending


def begin(machine: Machine, check: Healthcheck | None) -> None:
    """Open the agent's shell; return when the health check succeeds. Where either fails the sandbox is closed."""
    try:
        machine.shell = Shell(machine)
        wait_healthy(machine.shell, check)
    except BaseException:
        machine.close()
        raise


def wait_healthy(shell: "Shell | Sandbox", check: Healthcheck | None) -> None:
    """Return when the check succeeds; SandboxError where it fails too often."""
    begun, failures = time.monotonic(), 0
    while check and (result := shell.run(check.command, check.timeout, fresh=True)).exit_code != 0:
        failures += time.monotonic() - begun >= check.start_period
        if failures >= check.retries:
            said = result.output[-500:]
            raise SandboxError(f"the health check {check.command!r} failed {failures} times: {said!r}")
        time.sleep(check.interval)
