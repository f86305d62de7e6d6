"""Commands in the persistent shell, in both backends."""

import hashlib
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rsi_sandbox import Backend, Sandbox, SandboxError, Task, open_backend, verify
from rsi_sandbox.pty import Screen
from rsi_sandbox.shell import clean
from sandbox_tasks import SOLUTION


def test_state_persists_unless_fresh(sandbox: Sandbox) -> None:
    sandbox.run("cd /tmp; COLOUR=blue; shout() { echo loud; }")
    assert sandbox.run("pwd; echo $COLOUR; shout").output == "/tmp\nblue\nloud\n"
    assert sandbox.run("pwd; echo $COLOUR; cd /tmp", fresh=True).output == "/app\nred\n"
    assert sandbox.run("exit 7", fresh=True).exit_code == 7
    assert sandbox.run("echo $COLOUR").output == "blue\n"


def test_exit_codes_and_environment(sandbox: Sandbox) -> None:
    assert sandbox.run("false").exit_code == 1
    assert sandbox.run("no-such-command").exit_code == 127
    assert sandbox.run("hostname; umask; locale 2>/dev/null | head -0; echo $LC_ALL $TERM").output == (
        "sandbox\n0022\nC dumb\n"
    )
    assert sandbox.run('read line; echo "[$line]"').output == "[]\n"  # nothing waits on standard input
    assert sandbox.run("echo $TZ $DEBIAN_FRONTEND $PAGER; date -d @0 +%H%Z").output == (
        "UTC noninteractive cat\n00UTC\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        "echo 'unclosed",
        'echo "unclosed',
        "cat <<END\nnever",
        "if true; then",
        "echo $(",
    ],
)
def test_unclosed_command_does_not_wedge_the_shell(sandbox: Sandbox, command: str) -> None:
    sandbox.run("KEPT=yes")
    assert sandbox.run(command).limit is None
    result = sandbox.run("echo $KEPT")
    assert (result.output, result.exit_code) == ("yes\n", 0)


def test_long_command_arrives_whole(sandbox: Sandbox) -> None:
    text = "".join(f"line {i} 'quoted' \\ $x\n" for i in range(12_000))
    assert sandbox.run(f"cat > /tmp/long <<'END'\n{text}END\nwc -c < /tmp/long").output.strip() == str(len(text))


def test_shell_that_ends_is_replaced(sandbox: Sandbox) -> None:
    for command, code in (("exit 3", 3), ("set -e; false", 1), ("exec true", 0), ("kill -9 $$", 137)):
        result = sandbox.run(f"cd /tmp; {command}")
        assert result.exit_code == code and "a new one was started" in result.output
        assert sandbox.run("pwd").output == "/app\n"


def test_hostile_shell_state_does_not_break_the_protocol(sandbox: Sandbox) -> None:
    sandbox.run("set -u; set -f; IFS=0123456789; LC_ALL=C.UTF-8; exec 250<&- 251>&-; trap 'echo trapped' ERR")
    assert sandbox.run("echo é 12").output == "é 12\n"
    assert sandbox.run("set -x; printf() { echo no; }; read() { :; }").exit_code == 0
    assert sandbox.run("set +x; echo fine").output.endswith("fine\n")


def test_timeout_kills_descendants_and_keeps_state(sandbox: Sandbox) -> None:
    sandbox.run("KEPT=yes; cd /tmp; sleep 1000 & EARLIER=$!")
    begun = time.monotonic()
    result = sandbox.run("echo before; (setsid sleep 4242 &); env -i setsid sleep 4243 & sleep 4244; echo after", 2)
    assert (result.output, result.exit_code, result.limit) == ("before\n", None, "timeout")
    assert time.monotonic() - begun < 60
    left = sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
    assert "424" not in left and "sleep 1000" in left
    assert sandbox.run("echo $KEPT $PWD; kill -0 $EARLIER && echo alive").output == "yes /tmp\nalive\n"


def test_a_background_child_that_holds_the_output_is_not_waited_for(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    assert sandbox.run("sleep 300 & (setsid sleep 300 &); echo on", timeout=200).output == "on\n"
    assert time.monotonic() - begun < 60


def test_output_that_never_pauses_does_not_put_off_the_limit(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    assert sandbox.run("while :; do echo x; sleep 0.01; done", timeout=1).limit == "timeout"
    assert 1 <= time.monotonic() - begun < 60


def test_fifty_timeouts_in_a_row_leave_nothing(sandbox: Sandbox) -> None:
    sandbox.run("KEPT=yes")
    for _ in range(50):
        command = "for i in 1 2 3; do (setsid sleep 500 &); sleep 500 & done; sleep 500; touch late"
        assert sandbox.run(command, timeout=0.1).limit == "timeout"
    assert sandbox.run("echo $KEPT; ls").output == "yes\nwords.txt\n"  # nothing begins after the limit
    until = "for i in {1..300}; do set -- /proc/[0-9]*; (($# < 8)) && break; sleep 0.1; done; echo $#"
    assert int(sandbox.run(until, timeout=60).output) < 8  # zombies are reaped, too


@pytest.mark.parametrize(
    "command",
    [
        "inner() { while :; do sleep 0.1; done; }; outer() { inner; inner; }; outer",
        "x=$(sleep 500); sleep 500",
        "sleep 500 | cat; (sleep 500)",
        "wait; sleep 300 & wait",
        "eval 'sleep 500; while read -t 500; do :; done < <(sleep 500)'",
    ],
)
def test_whatever_is_cut_the_state_stays(sandbox: Sandbox, command: str) -> None:
    sandbox.run("KEPT=yes; cd /tmp")
    assert sandbox.run(command, timeout=0.5).limit == "timeout"
    assert sandbox.run("echo $KEPT; pwd").output == "yes\n/tmp\n"


def test_a_program_in_the_shells_place_is_ended_too(sandbox: Sandbox) -> None:
    assert sandbox.run("trap '' USR2; exec sleep 500", timeout=0.5).limit == "timeout"
    assert sandbox.run("echo again").output == "again\n"


def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    sandbox.run("for i in {1..100}; do (sleep 0 &) ; done")
    count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"
    assert sandbox.run(f"until [[ $({count}) == 0 ]]; do sleep 0.1; done", timeout=60).exit_code == 0


def test_timeout_of_builtins_keeps_state(sandbox: Sandbox) -> None:
    sandbox.run("KEPT=yes")
    assert sandbox.run("while :; do :; done", 0.3).limit == "timeout"
    assert sandbox.run("echo $KEPT").output == "yes\n"
    assert sandbox.run("loop() { while :; do :; done; }; loop", 0.3, fresh=True).limit == "timeout"
    assert sandbox.run("echo $KEPT").output == "yes\n"


def memory_kib() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_flood_is_bounded_while_streaming(sandbox: Sandbox) -> None:
    result = sandbox.run("echo head; seq 200000; echo tail")
    assert result.limit is None and result.output.startswith("head\n1\n") and result.output.endswith("tail\n")
    assert len(result.output) < 11_000 and result.dropped_bytes > 1_000_000
    assert f"[{result.dropped_bytes} bytes of " in result.output
    before = memory_kib()
    result = sandbox.run("yes", timeout=300)
    assert (result.limit, result.exit_code) == ("output", None) and len(result.output) < 11_000
    assert memory_kib() - before < 8 << 10, "16 MiB came, none of which may be held"
    assert sandbox.run("echo ok").output == "ok\n"


def test_output_cannot_forge_the_end(sandbox: Sandbox) -> None:
    forged = "printf '\\036%s 0\\036' 0123456789abcdef0123456789abcdef; printf '\\036'; echo still here; (exit 9)"
    result = sandbox.run(forged)
    assert result.exit_code == 9 and "still here" in result.output
    spread = "for fd in 1 2 250 251; do echo '0 0' >&$fd; done 2>/dev/null; exit 4"
    assert sandbox.run(f"({spread})").exit_code == 4
    assert sandbox.run("echo ok").output == "ok\n"


def test_any_bytes_decode(sandbox: Sandbox) -> None:
    result = sandbox.run(r"printf 'a\xff\xc3b\xe2\x82'; printf '\xe2\x82\xac'; head -c 3000 /dev/urandom >/dev/null")
    assert result.output.startswith("a��b") and result.output.endswith("€")
    every = sandbox.run('for i in {0..255}; do printf "\\\\x$(printf %x $i)"; done')
    assert every.exit_code == 0 and "ABC" in every.output and every.output.count("\ufffd") == 128


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]52;c;ZXZpbA==\x07x", "x"),
        ("\x1b]0;title\x1b\\x", "x"),
        ("\x1bPdata\x1b\\x", "x"),
        ("\x1bcx", "x"),
        ("\x1b]unterminated", "unterminated"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x9b31mb", "a31mb"),
        ("a\bb\x00c\td\n", "abc\td\n"),
    ],
)
def test_control_sequences_are_stripped(raw: str, expected: str) -> None:
    assert clean(raw) == expected


def test_control_sequences_are_stripped_in_a_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.run(r"printf '\033]0;t\007\033[2Jx\033[0m\n'").output == "x\n"


def test_files(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match=r"'data\.bin' is not an absolute path"):
        sandbox.write("data.bin", b"")
    sandbox.write("/app/deep/er/data.bin", b"\0\xff")
    assert sandbox.read("/app/deep/er/data.bin") == b"\0\xff"
    sandbox.run("mkfifo /app/pipe; ln -s /etc/passwd /app/link; echo 12345 > /app/five")
    assert sandbox.read("/app/five", limit=3) == b"123"
    for path in ("/app/pipe", "/app/link", "/app/nothing", "/app"):
        with pytest.raises(FileNotFoundError):
            sandbox.read(path)


def test_closed_sandbox_is_an_error_not_an_observation(backend: Backend, task: Task) -> None:
    sandbox = backend.start(task)
    sandbox.stop()
    with pytest.raises(SandboxError):
        sandbox.run("echo alive", timeout=5)
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError):
        sandbox.run("echo alive")


def test_sixteen_threads(backend: Backend, task: Task) -> None:
    def attempt(number: int) -> tuple[str, bool]:
        with backend.start(task) as sandbox:
            sandbox.run(f"NUMBER={number}; " + (SOLUTION if number % 2 else "true"))
            return sandbox.run("echo $NUMBER").output, verify(backend, task, sandbox).strict

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(attempt, range(16))) == [(f"{i}\n", bool(i % 2)) for i in range(16)]


@pytest.mark.parametrize(
    ("command", "exhausted"),
    [
        ("echo No space left on device; exit 1", ()),  # a claim alone proves nothing
        ("for i in {1..400}; do sleep 300 & done", ("processes",)),
        ("head -c 1100M /dev/zero > /app/big; s=$?; rm -f /app/big; (exit $s)", ("disk",)),
        ("awk 'BEGIN { s = \"x\"; while (1) s = s s }'", ("memory",)),
    ],
)
def test_what_runs_out_is_named(sandbox: Sandbox, command: str, exhausted: tuple[str, ...]) -> None:
    if "big" in command and sandbox.__class__.__name__ == "LocalSandbox":
        command = "head -c 1100M /dev/zero > /app/big"  # full as long as the file is there
    result = sandbox.run(command, timeout=25 if "sleep" in command else 200)  # bash tries again for 15 s, then ends
    assert result.exhausted == exhausted, result
    assert sandbox.run("echo alive").output.endswith("alive\n")


def typed(terminal: Screen, keys: str, wanted: str) -> str:
    """What is shown after `keys`, up to `wanted`, however long that takes a busy machine."""
    shown, deadline = terminal.type(keys, 0.2), time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < deadline, (keys, shown)
        shown += terminal.type("", 0.2)
    return shown


def test_terminal(sandbox: Sandbox) -> None:
    sandbox.run("echo from-the-shell > /tmp/file")
    terminal = sandbox.terminal(rows=20, columns=70)
    typed(terminal, "cat /tmp/file\n", "from-the-shell")
    typed(terminal, "stty size\n", "20 70")
    typed(terminal, "test -t 0 && echo is a termi''nal\n", "is a terminal")
    typed(terminal, "echo beg''un; sleep 1000\n", "begun")
    typed(terminal, "\x03", "^C")
    typed(terminal, "echo back a''gain\n", "back again")
    lines = "".join(f"{number} {'x' * 1500}\n" for number in range(14))  # 21 KB
    typed(terminal, f"cat > /tmp/typed <<'END'\n{lines}END\necho writ''ten\n", "written")
    assert sandbox.run("md5sum < /tmp/typed").output.split()[0] == hashlib.md5(lines.encode()).hexdigest()
    typed(terminal, "read -p sec''ret: -s word\n", "secret:")
    shown = typed(terminal, "hidden\necho go''ne\n", "gone")
    assert "hidden" not in shown
    typed(terminal, "echo $word\n", "hidden")
    flood = terminal.type("yes | head -c 3000000; echo at its e''nd\n", 0.1)
    flood += "" if "at its end" in flood else typed(terminal, "", "at its end")
    assert "y\ny\n" in flood
    assert sandbox.run("echo beside").output == "beside\n"
    terminal.type("exit\n", 0.1)
    with pytest.raises(SandboxError, match="ended"):
        for _ in range(300):
            terminal.type("echo\n", 0.2)
    terminal.close()
    terminal.close()
    with pytest.raises(SandboxError, match="closed"):
        terminal.type("echo\n", 0.1)


def test_a_flooded_terminal_keeps_head_and_tail(sandbox: Sandbox) -> None:
    terminal = sandbox.terminal()
    typed(terminal, "echo read''y\n", "ready")
    terminal.type("yes | head -c 3000000; touch /tmp/written\n", 0)
    flood = terminal.type("", 5)
    assert len(flood) < 11_000 and "omitted" in flood


def test_terminal_does_not_outlive_its_sandbox(backend: Backend, task: Task) -> None:
    with backend.start(task) as sandbox:
        terminal = sandbox.terminal()
        typed(terminal, "sleep 1234 & echo beg''un\n", "begun")
        sandbox.stop()
        with pytest.raises(SandboxError):
            for _ in range(300):
                terminal.type("echo\n", 0.2)


def test_the_agent_cannot_leave_its_user_by_the_terminal(task: Task) -> None:
    with open_backend("local", "tests") as backend, backend.start(task) as sandbox:
        terminal = sandbox.terminal()
        typed(terminal, "id\n", "uid=1000")
        typed(terminal, "grep CapEff /proc/self/status | tr -d '\\t'\n", "CapEff:0000000000000000")
        typed(terminal, "cat /proc/1/environ\n", "denied")
