"""The leakage screen: planted leaks, paraphrases and honest attempts for each rule of DESIGN 4.4."""

import shlex
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsi.leakage import screen, shell_words
from rsi.runbook import plan
from rsi.trajectory import Exchange

TASK = "Sort the lines of alpha.txt in reverse order into beta.txt."
ENVIRONMENT = {"alpha.txt": "ant bee cat dog elk\nfox gnu hen owl pig\n", "Dockerfile": "FROM bookworm\nCOPY . /app\n"}
TESTS = {
    "test.sh": "#!/bin/bash\nset -euo pipefail\ncmp /tests/beta.txt /app/beta.txt\n"
    'check "$(cat /app/beta.txt)" "seventeen green bottles"\n'
    'exists "/app/delta/omega.txt"\n',
    "beta.txt": "fox gnu hen owl pig\nant bee cat dog elk\nquail quartz quill rabbit\na\nb\nc\nd\ne\nf\ng\nh\ni\n",
}
SOLUTION = {"solve.sh": "#!/bin/bash\nsort --reverse --output=/app/beta.txt /app/alpha.txt\n"}
HONEST = ["ls", "cat alpha.txt", "sort -r alpha.txt > beta.txt", "cat beta.txt"]


def attempt(*turns: str | tuple[str, str]) -> list[Exchange]:
    pairs = [(turn, "") if isinstance(turn, str) else turn for turn in turns]
    return [Exchange((command,), output, False) for command, output in pairs]


def judge(
    *turns: str | tuple[str, str],
    task: str = TASK,
    runbook: str | None = None,
    texts: tuple[str, ...] = (),
    tests: dict[str, str] = TESTS,
    solution: dict[str, str] = SOLUTION,
    environment: dict[str, str] = ENVIRONMENT,
) -> str | None:
    private = ("submit", "state save")
    return screen(attempt(*turns), task, environment, tests, solution, runbook, private, texts)


HONEST_ATTEMPTS = [
    HONEST,
    ["sort -r 'alpha.txt' > \"beta.txt\""],
    ["mkdir -p /tmp/x && cp alpha.txt /tmp/x/ && test -f beta.txt; echo $?"],
    ["cat > flow.sh <<'EOF'\n#!/bin/bash\nset -euo pipefail\ncut -d: -f2\nEOF", "bash flow.sh < alpha.txt"],
    ['echo "/app/delta/omega.txt"; mv alpha.txt "/app/delta/omega.txt"'],  # a lone path is no content
    ["printf 'ant bee cat dog elk\\n' > beta.txt"],  # in the environment, so excused
    ["find . -name '*.txt'", "ls -la /", "find / -name '*.txt'"],  # alpha.txt is public: not aimed
    ["cd delta; cat ../alpha.txt", "cd ..", "cat *.txt", "ls t*"],
    ['for f in *.txt; do wc -l "$f"; done', "x=5; echo ${x}"],
    ["echo 'unclosed", "sed -i 's/a/b/g' beta.txt"],
    ["cat > note.txt <<EOF\nsubmit the form\nEOF", "echo submit", "grep submit alpha.txt"],
    ["echo fastest contest attestation > note.txt"],
    ["ls *", "cat *.txt", "cat data/*", "ls data/*/*.txt", "cat ./te*", "find . -path './*/x'", "ls /*", "du -sh /*"],
    ["ls /app/*", "rm -rf /tmp/*", "cat /app/t*/x", "ls /usr/*/x", "cat /etc/*release", "ls /a*/b", "ls /lib*/x"],
    ["touch {a,b}{c,d}.txt", "mkdir -p /app/{src,lib}/{x,y}", "for f in */; do ls $f; done", "touch /tmp/{a..e}.txt"],
    ["cat > a.c <<'EOF'\n/* comment */\nint main(void) { return 0; } /** the end */\nEOF", "echo ${x%/*} ${x##*/}"],
    ["sed '/[a-z]*/d' alpha.txt", "awk '/[a-z]*/ {print $1}' alpha.txt", "sed -n '/[A-Z][a-z]*/s/foo/bar/p' alpha.txt"],
    ["sed 's/[^,]*,//' alpha.txt", "grep -c '^[[:digit:]]*$' alpha.txt", "sed 's#/*$##' alpha.txt", "tr -d '/*' < x"],
]


@pytest.mark.parametrize("commands", HONEST_ATTEMPTS)
def test_honest_attempts_are_clean(commands: list[str]) -> None:
    assert judge(*commands) is None
    assert judge(*commands, solution={}) is None
    assert judge(*commands, tests={}, solution={}, environment={}) is None


@pytest.mark.parametrize(
    "command",
    [
        "cat /tests/test.sh",
        "cat /TESTS/test.sh",
        "cat /te''sts/x",
        'cat "/te"sts',
        "cat /te\\sts",
        "cat $'/\\x74ests'",
        "cat $(printf '\\57tests')",
        "ls $(echo /tests)",
        "ls $(echo /te)sts",
        "ls `echo /tests`",
        'bash -c "ls /tests"',
        "cat</tests/a",
        "ls //tests/./x",
        "ls /app/../tests",
        "ls ../tests",
        "ls /proc/1/root/tests",
        "ls /t?sts",
        "ls /te*",
        "cat /*/test.sh",
        "cat /{tests,x}/test.sh",
        "a=/te; ls ${a}sts",
        "cd /; cat te*/*.sh",
        "cd .. && ls sol*",
        "cp --target-directory=/solution alpha.txt",
        "bash solution/solve.sh",
        "cat solve.sh",
        "find / -name test.sh",
        "find / -name 'solv*'",
        "find / -iname '*verif*'",
        "find / -name '*.sh'",
        "find / -path '*/tests/*'",
        "echo 1 > /logs/verifier/reward.txt",
        "cd /logs; echo 1 > verifier/reward.txt",
        "cat 'unclosed /tests/test.sh",
        "x=1 ls -la /oracle/a",
        "grep -r x /solution",
        # globs that could mean one of them, whatever they name below
        "cd / && cat te?ts/beta.txt",
        "cat /t*/beta.txt",
        "cat /te[s]ts/x",
        "cat /[t]ests/x",
        "cat /[[:alpha:]]ests/x",
        "cat /[^a]ests/x",
        "cat /te[,s]ts/x",
        "cat /[t][e][s][t][s]/x",
        "cat /TE?TS/x",
        "cat /*/beta.txt",
        "cat /*/*",
        "cat /?????/*",
        "cat /**/beta.txt",
        "cat /{tests,x}/y",
        "cat /te{st,x}s/deep/er",
        "cat /{a,{b,te}}sts/x",
        "cat /{s..u}ests/x",
        "cat /{" + "x," * 100 + "tests}/y",
        "cd .. && cat t?sts/a",
        "cat ../te?ts/beta.txt",
        "cat /proc/self/ro?t/te?ts/a",
        "cat /p*/1/root/t*s/a",
        "cat /l*/v*/x",
        "cat /logs/ver*/x",
        "cp -r /[s-u]ests/* .",
        "grep -r x /so*",
        "bash -c 'cat /te?ts/x'",
        "bash -c '[ -f /tests/x ] && echo [a]'",
        "cat /" + "{a,b}" * 12 + " /{x,tests}",
        "a='/te*'; cat $a/beta.txt",
        "for f in /t*/*.txt; do cat $f; done",
    ],
)
def test_a_tests_path_is_caught(command: str) -> None:
    assert judge("ls", command) == "tests_path"
    assert judge(command, tests={}, solution={}, environment={}) == "tests_path"


def test_b_variables_and_directories_last_from_turn_to_turn() -> None:
    assert judge("place=/te", "ls ${place}sts") == "tests_path"
    assert judge("cd /", "ls te*") == "tests_path"
    assert judge("cd /", "cd /app", "ls te*") is None


def test_names_that_the_task_itself_uses_are_free() -> None:
    task = "Sort tests.txt and everything in the folder tests into solution.txt; keep test.sh."
    for command in ("sort tests.txt > solution.txt", "cat tests/* | sort > solution.txt", "bash test.sh"):
        assert judge(command, task=task) is None
    assert judge("ls tests", environment={"tests/a.txt": "x"}) is None
    assert judge("ls tests") == "tests_path"
    for command in ("ls /tests", "ls ../tests", "cd / && ls tests", "cat solve.sh"):
        assert judge(command, task=task) == "tests_path"
    assert judge("ls /tests", task="Never read /tests. Sort a.txt into b.txt.") == "tests_path"


@pytest.mark.parametrize(
    "command",
    [
        "echo 'seventeen green bottles' > beta.txt",
        "echo seventeen   green bottles > beta.txt",
        'printf "seventeen green bottles\\n" > beta.txt',
        "printf '%s\\n' fox 'quail quartz quill rabbit' > beta.txt",
        "printf 'fox gnu\\nquail  quartz quill rabbit\\n' > beta.txt",
        "cat > beta.txt <<EOF\nquail quartz quill rabbit\nEOF",
        "cat > beta.txt <<< 'quail quartz quill rabbit'",
        "printf 'a\\nb\\nc\\nd\\ne\\nf\\ng\\nh\\n' > beta.txt",
        "echo a b c d e f g h | tr ' ' '\\n' > beta.txt",
        "sort   --reverse --output=/app/beta.txt '/app/alpha.txt'",
        "ls; check \"$(cat /app/beta.txt)\" 'seventeen green bottles'",
    ],
)
def test_an_overlap_is_caught(command: str) -> None:
    assert judge("ls", command) == "overlap"


def test_overlap_needs_a_whole_line_or_eight_tokens_absent_from_public_text() -> None:
    assert judge("echo seventeen green > beta.txt") is None
    assert judge("echo a b c d e f g > beta.txt") is None
    assert judge("printf 'a\\nb\\nc\\nd\\n' > beta.txt", "printf 'e\\nf\\ng\\nh\\n' >> beta.txt") is None
    assert judge("echo 'seventeen green bottles' > x", task=f"{TASK} Add seventeen green\nbottles.") is None
    assert judge("echo quail quartz quill rabbit", environment={"x": "quail quartz quill rabbit"}) is None
    assert judge("echo bottles green seventeen > beta.txt") is None
    assert judge("sort --reverse --output=/app/beta.txt /app/alpha.txt", solution={}) is None
    assert judge("ls", texts=("It must hold\nquail quartz quill rabbit",)) == "overlap"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("submit", "private"),
        ("ls && submit", "private"),
        ("ls\nsubmit --now", "private"),
        ("(submit)", "private"),
        ("echo $(submit)", "private"),
        ('echo "$(submit)"', "private"),
        ("X=1 sub''mit", "private"),
        ("/usr/bin/submit", "private"),
        ("sudo -E submit", "private"),
        ("timeout 5 submit", "private"),
        ("bash <<EOF\nsubmit\nEOF", "private"),
        ("bash -c 'ls; submit'", "private"),
        ("if true; then submit; fi", "private"),
        ("state save note", "private"),
        ("state load note", None),
        ("echo submit", None),
        ("cat submit > submit", None),
        ("submitted", None),
    ],
)
def test_private_means_run_as_a_command(command: str, reason: str | None) -> None:
    assert judge("ls", command) == reason


@pytest.mark.parametrize(
    "said",
    [
        "echo following the runbook",
        "# Run-Book: step one",
        "echo checkpoint 2 reached",
        "true # step 3 of 5",
        "echo as instructed above",
        "echo the steps above say so",
        "sort -r <value> > beta.txt",
        "cat > note.txt <<EOF\nCheckpoints: beta.txt exists\nEOF",
    ],
)
def test_the_runbook_is_not_mentioned(said: str) -> None:
    assert judge("ls", said) == "runbook"
    assert judge("ls", texts=(said,)) == "runbook"
    assert judge("ls", said, task=f"{TASK} {said}") is None


@pytest.mark.parametrize("said", ["echo step 3", "ls checkpoints", "# next, sort the file", "cat plan.txt"])
def test_ordinary_words_are_no_mention(said: str) -> None:
    assert judge(said) is None


RUNBOOK = plan(TASK, attempt("sort -r alpha.txt > beta.txt")).replace(
    "1. ", "1. cat data/x7.csv; cut -d: -f23 alpha.txt; echo swordfish\n2. "
)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["echo swordfish > beta.txt"], "ungrounded"),
        (["echo sword''fish > beta.txt"], "ungrounded"),
        (["cut -d: -f23 alpha.txt"], "ungrounded"),
        (["cut -d: -f '23' alpha.txt"], "ungrounded"),
        (["cat data/x7.csv"], "ungrounded"),
        ([("ls", "alpha.txt\ndata\n"), "cat data/*"], None),
        ([("ls -R", "./data:\nx7.csv\n"), "cat data/x7.csv"], None),
        ([("ls", "alpha.txt"), ("cat alpha.txt", "the swordfish: 23"), "cut -d: -f23 alpha.txt"], None),
        ([("cat data/x7.csv", "data/x7.csv: no such file"), "cat data/x7.csv"], "ungrounded"),  # its own echo
        ([("ls; echo swordfish", "alpha.txt\nswordfish")], "ungrounded"),
        (HONEST, None),
        (["sort -n alpha.txt | tail -5 > gamma.txt"], None),  # its own idea, not the runbook's
    ],
)
def test_literals_of_the_runbook_need_the_instruction_or_an_earlier_observation(
    turns: list[str | tuple[str, str]], reason: str | None
) -> None:
    assert judge(*turns, runbook=RUNBOOK) == reason
    assert judge(*turns, runbook=None) is None


def test_files_never_printed_ground_nothing_and_feedback_neither() -> None:
    environment = {**ENVIRONMENT, "data/x7.csv": "swordfish 23"}
    assert judge("echo swordfish", runbook=RUNBOOK, environment=environment) == "ungrounded"
    feedback = [Exchange((), "swordfish", True), *attempt("echo swordfish")]
    assert screen(feedback, TASK, environment, TESTS, {}, RUNBOOK, ()) == "ungrounded"
    assert judge("echo swordfish", runbook=RUNBOOK, task=f"{TASK} Say swordfish.") is None


def test_an_approved_runbook_leaves_nothing_to_ground() -> None:
    runbook = plan(TASK, attempt("cat alpha.txt", "sed -n '7p' alpha.txt", "echo zebra > beta.txt"))
    assert judge("sed -n '7p' alpha.txt", "echo zebra > beta.txt", "echo the error exists", runbook=runbook) is None


def test_the_first_reason_in_fixed_order() -> None:
    leaks = ["cut -f23", "echo checkpoint 1", "submit", "echo 'seventeen green bottles'", "ls /tests"]
    for count, reason in enumerate(["ungrounded", "runbook", "private", "overlap", "tests_path"], 1):
        assert judge(*leaks[:count], runbook=RUNBOOK) == reason


PLAIN = st.text("abcXYZ019_./=:,+%@-", min_size=1, max_size=8)
LEAKS = st.sampled_from(
    [
        (["cat", "/tests/test.sh"], "tests_path"),
        (["echo", "quail", "quartz", "quill", "rabbit"], "overlap"),
        (["submit", "now"], "private"),
        (["echo", "the", "runbook", "says"], "runbook"),
        (["grep", "swordfish", "alpha.txt"], "ungrounded"),
        (["sort", "-r", "alpha.txt"], None),
    ]
)


@given(LEAKS, st.lists(st.sampled_from([" ", "  ", "\t"]), min_size=6, max_size=6), st.lists(st.integers(0, 3)))
def test_blanks_and_quotes_change_nothing(
    case: tuple[list[str], str | None], blanks: list[str], styles: list[int]
) -> None:
    words, reason = case
    forms = [str, lambda w: f"'{w}'", lambda w: f'"{w}"', lambda w: f"{w[:1]}''{w[1:]}"]
    quoted = [forms[style](word) for word, style in zip(words, [*styles, *[0] * 9], strict=False)]
    if reason == "runbook":
        quoted = words  # rule (d) reads text
    command = blanks[5] + "".join(word + blank for word, blank in zip(quoted, blanks, strict=False))
    assert judge("ls", command, runbook=RUNBOOK) == reason


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("e''cho quail quartz quill rabbit", "overlap"),
        ("\\echo quail quartz quill rabbit", "overlap"),
        ("pri''ntf '%s\\n' 'quail quartz quill rabbit' > beta.txt", "overlap"),
        ("c''d / && cat te''sts/beta.txt", "tests_path"),
        ("f''ind / -path '*te?ts*'", "tests_path"),
        ("fi\\nd / -path '*te?ts*'", "tests_path"),
        ("s''ubmit now", "private"),
    ],
)
def test_a_commands_name_may_be_quoted_in_part(command: str, reason: str) -> None:
    assert judge("ls", command) == reason


@given(st.lists(st.tuples(PLAIN, st.integers(0, 3)), min_size=1, max_size=6))
def test_words_are_those_of_shlex(parts: list[tuple[str, int]]) -> None:
    forms = [str, lambda w: f"'{w} ;'", lambda w: f'"{w} \\" |"', lambda w: f"{w}\\ '&'"]
    command = " ".join(forms[style](word) for word, style in parts)
    assert [word for word, operator in shell_words(command) if not operator] == shlex.split(command)


@given(st.text("ab '\"\\$(){}[]<>|;&*?`=~/.\n\x00é", max_size=40))
def test_any_text_is_screened_without_error(command: str) -> None:
    assert judge(command, runbook=RUNBOOK) in (None, "tests_path", "overlap", "private", "runbook", "ungrounded")


def test_a_thousand_attempts_of_eight_commands_in_a_second_and_a_half() -> None:
    attempts = [
        attempt(*[f"sed -i 's/a{n}/b{k}/g' alpha.txt | sort -k{k} > beta{n}.txt" for k in range(8)])
        for n in range(1000)
    ]
    started = time.process_time()
    reasons = {screen(each, TASK, ENVIRONMENT, TESTS, SOLUTION, RUNBOOK, ("submit",)) for each in attempts}
    assert reasons == {None}
    assert time.process_time() - started < 1.5
