"""Planner and reviewer: honest runbooks pass, each planted fault is refused, no literal gets through."""

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsi.literals import HOLE, generalise, literals, words
from rsi.runbook import artifacts, plan, review, write_runbook
from rsi.trajectory import Exchange

SORT = "Sort the lines of alpha.txt in reverse order into beta.txt."
MOVE = "Move alpha.txt into the directory delta as omega.txt."
PORT = "Set port to 17 in app.conf and keep the other lines."
FLOW = "Write flow.sh. It must turn each input into its output, as in 1.in and 1.out."
CHAIN = (
    "Make the folder fern/moss. Sort a.txt into b.txt. Write the first 3 lines of b.txt to c.txt. "
    "Replace every owl with elk in c.txt. Add the line kite at the top of c.txt. Copy c.txt to fern/moss. "
    "Delete all .tmp files in dune. Make run.sh executable."
)


def exchanges(*commands: str) -> list[Exchange]:
    return [Exchange((command,), "", False) for command in commands]


CASES = [
    (SORT, ["sort -r alpha.txt > beta.txt"], ["sort -r alpha.txt > beta.txt"]),
    (MOVE, ["ls", "mkdir -p delta", "mv alpha.txt delta/omega.txt"], None),
    (PORT, ["sed -i s/^port=.*/port=17/ app.conf"], None),
    (
        FLOW,
        ["cat 1.in 1.out", "echo 'cut -d: -f2' > flow.sh"],
        ["cat 1.in 1.out", "echo 'cut -d: -f<value>' > flow.sh"],
    ),
    (
        CHAIN,
        [
            "mkdir -p fern/moss",
            "sort a.txt > b.txt",
            "head -n 3 b.txt > c.txt",
            "sed -i s/owl/elk/g c.txt",
            "sed -i '1i kite' c.txt",
            "cp c.txt fern/moss",
            "rm dune/*.tmp",
            "chmod +x run.sh",
        ],
        None,
    ),
]


@pytest.mark.parametrize(("instruction", "commands", "steps"), CASES)
def test_an_honest_success_becomes_an_approved_runbook(
    instruction: str, commands: list[str], steps: list[str] | None
) -> None:
    runbook = plan(instruction, exchanges(*commands, "submit"))
    assert review(instruction, runbook) == []
    assert re.findall(r"^\d+\. (.*)$", runbook, re.MULTILINE) == (steps or commands)
    assert "submit" not in runbook


def test_the_page_in_full() -> None:
    assert plan(MOVE, exchanges("mkdir -p delta", "mv alpha.txt delta/omega.txt")) == (
        f"# Runbook\nGoal: {MOVE}\nSteps:\n1. mkdir -p delta\n2. mv alpha.txt delta/omega.txt\n"
        "Checkpoints: delta/omega.txt exists\nRecovery: read the error and correct the command\n"
        "Artifacts: delta/omega.txt"
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo 42 > answer.txt", "echo <value> > answer.txt"),
        ("echo sort > answer.txt", "echo <value> > answer.txt"),  # a command's name may be the answer
        ("echo 'hello big world' > answer.txt", "echo '<value>' > answer.txt"),
        ("echo sort > flow.sh", "echo sort > flow.sh"),  # and is method in a script
        ("cat > answer.txt <<EOF\nsort\nEOF", "cat > answer.txt <<EOF\\n<value>\\nEOF"),
        ("cd x\nsort -u y", "cd <value>\\nsort -u <value>"),
        ("awk -F: '{print $2}' q | sort -u", "awk -F: '{print $<value>}' <value> | sort -u"),
        (
            'for f in *.txt; do wc -l < "$f"; done | tail -1',
            'for f in *.txt; do wc -l < "$f"; done | tail -1',
        ),
        ("sort -t, -k2,2n x.csv 2>/dev/null", "sort -t, -k<value>,<value>n <value> 2>/dev/null"),
        ("sed -n '7p' answer.txt", "sed -n '<value>p' answer.txt"),
        ("find . -type f -name '*.log' -exec rm {} \\;", "find . -type f -name '*.<value>' -exec rm {} \\;"),
        ("tr a-z A-Z < answer.txt", "tr a-z A-Z < answer.txt"),
        ("grep --swordfish answer.txt", "grep --<value> answer.txt"),
        ("cat $swordfish/x9 answer.txt", "cat $<value>/<value> answer.txt"),
    ],
)
def test_what_is_a_literal(command: str, expected: str) -> None:
    assert generalise(command, "Write the third answer to answer.txt and flow.sh.") == expected


def test_a_spelled_number_is_known() -> None:
    assert generalise("cut -f3 a.txt", "Cut the third field of a.txt.") == "cut -f3 a.txt"


def test_failed_repeated_private_and_feedback() -> None:
    told = [
        Exchange(("cat nope.txt",), "cat: nope.txt: No such file or directory\n", False),
        Exchange(("srot alpha.txt",), "bash: line 1: srot: command not found", False),
        Exchange(("ls",), "alpha.txt\n", False),
        Exchange(("sort alpha.txt > beta.txt",), "", False),
        Exchange((), "bash: The task is not solved yet.", True),
        Exchange(("ls",), "alpha.txt\nbeta.txt\n", False),
        Exchange(("sort -r alpha.txt > beta.txt", "submit"), "", False),
    ]
    steps = re.findall(r"^\d+\. (.*)$", plan(SORT, told), re.MULTILINE)
    assert steps == ["ls", "sort alpha.txt > beta.txt", "sort -r alpha.txt > beta.txt"]
    assert "not solved" not in plan(SORT, told)


HONEST = plan(SORT, exchanges("sort -r alpha.txt > beta.txt"))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (f"Goal: {SORT}\n", "", "missing section: Goal"),
        ("Steps:\n1. sort -r alpha.txt > beta.txt\n", "", "missing section: Steps"),
        ("1. sort -r alpha.txt > beta.txt\n", "", "missing section: Steps"),
        ("Checkpoints: beta.txt exists\n", "", "missing section: Checkpoints"),
        ("Recovery: read the error and correct the command\n", "", "missing section: Recovery"),
        ("Artifacts: beta.txt", "Artifacts:", "missing section: Artifacts"),
        ("1. sort -r alpha.txt", "1. echo 4711", "answer literal: 4711"),
        ("1. sort -r alpha.txt", "1. echo 'swordfish'", "answer literal: swordfish"),
        ("1. sort -r alpha.txt", "1. echo cut", "answer literal: cut"),
        ("read the error", "the last line is zebra", "answer literal: zebra"),
        ("beta.txt exists", "beta.txt has 12 lines", "answer literal: 12"),
        ("Goal: Sort", "Goal (see gecko): Sort", "answer literal: gecko"),
        ("1. sort", "1. submit\n2. sort", "private command: submit"),
        ("1. sort", "1. note plan; sort", "private command: note"),
        ("read the error", "use submit", "private command: submit"),
        ("Artifacts: beta.txt", "Artifacts: beta.txt gamma.txt", "artifact not asked for: gamma.txt"),
        ("Artifacts: beta.txt", "Artifacts: alpha.txt", "artifact not asked for: alpha.txt"),
        ("read the error", "read the tests", "mentions verification: tests"),
        ("read the error", "make the Verifier content", "mentions verification: Verifier"),
        ("read the error", "look at the solution", "mentions verification: solution"),
        ("read the error", "keep the reward", "mentions verification: reward"),
        ("1. sort", "1. cat test_outputs.py; sort", "mentions verification: test_outputs.py"),
        ("1. sort", "1. ls /tests; sort", "mentions verification: /tests"),
        ("1. sort", "1. cat solve.sh; sort", "mentions verification: solve.sh"),
        ("1. sort -r alpha.txt > beta.txt\n", "".join(f"{n}. ls\n" for n in range(1, 60)), "over one page"),
        ("1. sort -r alpha.txt > beta.txt\n", f"1. sort {' ' * 3000}\n", "over one page"),
    ],
)
def test_the_reviewer_refuses_each_planted_fault(before: str, after: str, reason: str) -> None:
    assert review(SORT, HONEST, ("submit", "note")) == []
    planted = HONEST.replace(before, after)
    assert planted != HONEST
    assert reason in review(SORT, planted, ("submit", "note"))


def test_words_of_the_instruction_are_no_mention_but_protected_directories_are() -> None:
    instruction = "Sort tests.txt into beta.txt."
    runbook = plan(instruction, exchanges("test -f tests.txt && sort tests.txt > beta.txt"))
    assert review(instruction, runbook) == []
    assert review(instruction, runbook.replace("sort tests.txt", "sort /tests/tests.txt")) != []
    assert "mentions verification: tests" in review(instruction, runbook.replace("the error", "the tests"))


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (SORT, ["beta.txt"]),
        (MOVE, ["omega.txt"]),
        (PORT, ["app.conf"]),
        ("Write amber.txt upside down to fern/moss.txt.", ["fern/moss.txt"]),
        ("Add the line kite at the end of a.txt.", ["a.txt"]),
        ("Delete all .tmp files in dune.", []),
        ("Make the folder fern/moss.", []),
        ("Make a folder called moss.", ["moss"]),
        ("Write oak.sh that turns ivy.in into ivy.out.", ["oak.sh"]),
        ("Write oak.sh, which turns a.in into a.out, and elm.sh that turns a.in into b.out.", ["oak.sh", "elm.sh"]),
        ("README.md names the main config. Set limit to 7 there.", []),
        ("Put the sum (e.g. 3.5) of x.csv into /app/out/sum.txt", ["/app/out/sum.txt"]),
    ],
)
def test_artifacts(instruction: str, expected: list[str]) -> None:
    assert artifacts(instruction) == expected


def test_a_refused_step_is_dropped_in_the_revision_round() -> None:
    def careless(instruction: str, exchanges: list[Exchange], objections: tuple[str, ...]) -> str:
        return plan(instruction, exchanges, objections).replace("echo <value>", "echo 4711")

    done = exchanges("echo 4711 > beta.txt", "sort -r alpha.txt > beta.txt", "ls tests")
    runbook, rounds = write_runbook(plan, review, SORT, done)
    assert rounds == [[], []][:1] and runbook is not None and HOLE in runbook
    runbook, rounds = write_runbook(careless, review, SORT, done)
    assert runbook is None and rounds[0] == ["answer literal: 4711"] and len(rounds) == 2


def test_revision_shortens_and_drops() -> None:
    long = exchanges(*[f"cat alpha.txt | head -n {n}" for n in range(70)], "sort -r alpha.txt > beta.txt")
    runbook, rounds = write_runbook(plan, review, SORT, long)
    assert "over one page" in rounds[0] and runbook is not None and "sort -r alpha.txt > beta.txt" in runbook
    private = exchanges("env note x", "sort -r alpha.txt > beta.txt")
    planner, reviewer = partial(plan, private=()), partial(review, private=("env",))
    runbook, rounds = write_runbook(planner, reviewer, SORT, private)
    assert rounds[0] == ["private command: env"] and runbook is not None and "env" not in runbook


def test_nothing_learnt_gives_no_runbook() -> None:
    assert write_runbook(plan, review, SORT, exchanges("submit"))[0] is None


FRAGMENTS = st.sampled_from(
    "sort cat echo sed awk printf 17 -k2 -f 2,2n '1i' ' \" $x ${y} $2 | ; && > >> .sh a.txt alpha.txt s/a/b/g $( ) \\n"
    " --key= swordfish x-y <<EOF \n EOF - . / { print } * = 2>&1 bash -c é".split(" ")
)


@given(st.lists(FRAGMENTS, max_size=14), st.booleans())
def test_no_literal_survives(parts: list[str], spaced: bool) -> None:
    command = (" " if spaced else "").join(parts)
    text = generalise(command, SORT)
    assert literals(text, words(SORT)) == []
    assert generalise(text, SORT) == text
    assert "swordfish" not in text.replace("swordfish" * 2, "") or "swordfish" not in re.split(r"\W", text)


@given(
    st.text("0123456789", min_size=2, max_size=6),
    st.sampled_from(["echo {}", "grep {} alpha.txt", "head -n {}"]),
)
def test_a_number_never_reaches_the_runbook(number: str, command: str) -> None:
    runbook = plan(SORT, exchanges(command.format(number) + " > beta.txt"))
    assert number not in re.findall(r"\d+", runbook.replace("1. ", "", 1))
    assert review(SORT, runbook) == []
