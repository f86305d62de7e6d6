"""Runbooks: a success told again as a method, without its answers (DESIGN 4.4).

A planner sees the public instruction and one successful trajectory; a reviewer sees the public
instruction and the runbook. Any two functions will do; the deterministic pair here needs no model.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from .literals import HOLE, WORD, generalise, literals, words
from .trajectory import Exchange

SECTIONS = ("Goal", "Steps", "Checkpoints", "Recovery", "Artifacts")
MAX_LINES, MAX_CHARACTERS = 60, 3000
PROSE = frozenset(
    "a after again all an and answer any appears are as at be been before both by can change check command"
    " commands content contents copy correct create directory do does each empty error every exist exists"
    " expected fails file files first for from given has have how if in input inspect instruction into is it"
    " its keep last line lines list look make method more most name names next no none not of on one only"
    " order other out output over path paths place print read remove repeat result run same second see set"
    " should so steps than that the their them then there these they this to try until use used value values"
    " was what when where which while with without work write written wrong you your".split()
)


Planner = Callable[[str, Sequence[Exchange], Sequence[str]], str]
"""Makes a runbook of the instruction, a success, and the reviewer's objections to the runbooks before."""
Reviewer = Callable[[str, str], list[str]]
"""Reasons against a runbook, from the instruction and the runbook alone; none when it is approved."""

_ERROR = re.compile(
    r"^(?:-?(?:ba)?sh|/bin/(?:ba)?sh): |^[Uu]sage: |^Try '|^[\w./-]+: .*(?:No such file|not found|denied|"
    r"[Ii]s a directory|[Nn]ot a directory|invalid|missing|cannot|unrecognized|unknown|extra operand|"
    r"requires|syntax error|unterminated|File exists|same file|not empty)"
)
_LOOKS = re.compile(r"\s*(?:ls|cat|head|tail|pwd|wc|find|file|stat|less|more|diff|grep|nl|od)\b[^>]*")


def _failed(output: str) -> bool:
    lines = [line for line in output.splitlines() if line.strip() and not re.fullmatch(r"exit \d+", line)]
    return bool(lines) and all(_ERROR.match(line) for line in lines)


def _commands(exchanges: Iterable[Exchange], private: Sequence[str]) -> list[str]:
    """Commands worth repeating, in order: no failed, private or repeated ones.

    Of equal commands that change something the last stays (the state it left is the one that was
    verified), of equal looks the first; `cd` and appends mean something else each time.
    """
    kept: list[str] = []
    for exchange in exchanges:
        if not exchange.feedback and _failed(exchange.output):
            continue
        for command in (c.strip() for c in exchange.commands):
            if not command or any(command.split()[0] == p.split()[0] for p in private):
                continue
            if command in kept and not command.startswith("cd ") and ">>" not in command:
                if _LOOKS.fullmatch(command):
                    continue
                kept.remove(command)
            kept.append(command)
    return kept


_PATH = re.compile(
    r"(?<![\w*./~-])(?:(?:~|\.\.?)?/)?(?:[\w.-]+/)*[\w-]*(?:\.[A-Za-z]\w{0,7})+(?![\w*])|(?<![\w*.])/[\w/-]+\w"
)
_NAMED = re.compile(
    r"\b(?:(?:directory|folder|file|script|link|archive)(?:\s+(?:called|named))?|called|named)\s+([\w-]+)(?=[\s.,;]|$)"
)
_OBJECT = r"\s+(?:the\s+)?(?:file\s+)?['\"`]?$"
_TARGET = re.compile(rf"\b(?:to|into|as|called|named){_OBJECT}", re.IGNORECASE)
_GONE = re.compile(rf"\b(?:move|rename|delete|remove){_OBJECT}", re.IGNORECASE)
_MADE = re.compile(rf"\b(?:write|create|make|build|and){_OBJECT}", re.IGNORECASE)
_TELLS = re.compile(r"\s+(?:names|says|holds|contains|lists|has|tells|describes|gives|shows)\b")
_INPUT = re.compile(
    rf"\b(?:of|from|using|than|with|like|after|read|reads|copy|sort|count|reverse){_OBJECT}", re.IGNORECASE
)


def _sentence_artifacts(sentence: str) -> list[str]:
    paths = []
    for match in _PATH.finditer(sentence):
        path, before, after = match[0], sentence[: match.start()], sentence[match.end() :]
        suffix = path[0] == "." and re.match(r"\s+files?\b", after)
        if path not in ("e.g", "i.e") and not suffix and not _GONE.search(before):
            paths.append((path, before, after))
    described = [p for p, before, after in paths if _MADE.search(before) and re.match(r",?\s+(?:that|which)\b", after)]
    targets = [p for p, before, _ in paths if _TARGET.search(before)]
    free = [p for p, before, after in paths if not _INPUT.search(before) and not _TELLS.match(after)]
    return described or targets or free or [p for p, _, after in paths if not _TELLS.match(after)]


def artifacts(instruction: str) -> list[str]:
    """Paths that the instruction asks for, in its order, sentence by sentence: the file names after
    words such as `into` (or made to do something: `Write a.sh that ...`), else those that it does not
    only read. Without any file name, the names after words such as `directory` or `called`.

    `artifacts("Sort alpha.txt into beta.txt.")` is `["beta.txt"]`.
    """
    sentences = re.split(r"(?<=[.!?])\s+|\n", instruction)
    found = [path for sentence in sentences for path in _sentence_artifacts(sentence)]
    if not found and not _PATH.search(instruction):
        found = [m[1] for m in _NAMED.finditer(instruction) if m[1].lower() not in PROSE]
    return list(dict.fromkeys(found))


def _located(artifact: str, commands: Sequence[str], known: frozenset[str]) -> str:
    """`artifact` with the directories that the commands gave it, where the instruction names them."""
    for command in reversed(commands):
        for path in re.findall(rf"(?<![\w./-])((?:[\w.-]+/)+{re.escape(artifact)})(?![\w./-])", command):
            if all(part in known for part in path.split("/")):
                return str(path)
    return artifact


def plan(
    instruction: str,
    exchanges: Sequence[Exchange],
    objections: Sequence[str] = (),
    private: Sequence[str] = ("submit",),
) -> str:
    """The deterministic planner: the commands that led to the success, their literals generalised.

    `objections` (reasons of `review`) drop what was objected to: the steps and artifacts that hold
    the named word; over one page, first the looks and then the last steps.
    """
    known = words(instruction)
    commands = _commands(exchanges, private)
    goal = re.split(r"(?<=[.!?])\s|\n", instruction.strip(), maxsplit=1)[0]
    refused = {o.split(": ", 1)[1] for o in objections if ": " in o}
    wanted = [_located(a, commands, known) for a in artifacts(instruction)]
    gone = r"(?:^|[;&]\s*)(?:mv|rm)(?:\s+-\w+)*\s+(\S+)"
    moved = {path for command in commands for path in re.findall(gone, command)}
    wanted = [a for a in wanted if a not in refused and a not in moved]
    too_long = "over one page" in objections
    steps = [generalise(c, instruction) for c in commands if not (too_long and _LOOKS.fullmatch(c))]
    steps = [s for s in steps if not refused & set(WORD.findall(s))]
    if too_long:
        steps = steps[: MAX_LINES - 8]
        while len("\n".join(steps)) + 5 * len(steps) + len(goal) + 300 > MAX_CHARACTERS and steps:
            steps.pop()
    checkpoint = f"{wanted[-1]} exists" if wanted else "no error"
    lines = ["# Runbook", f"Goal: {goal}", "Steps:"]
    lines += [f"{n}. {step}" for n, step in enumerate(steps, 1)]
    lines += [f"Checkpoints: {checkpoint}", "Recovery: read the error and correct the command"]
    return "\n".join([*lines, f"Artifacts: {' '.join(wanted) or 'none'}"])


_VERIFICATION = re.compile(
    r"(?:unit|py|hidden)?[-_]?tests?|test_\w+(?:\.\w+)?|tests?\.\w+|verifi(?:er|ers|cation)|solutions?(?:\.\w+)?|solve\.sh"
    r"|rewards?|reward\.\w+|grad(?:er|ers|ing)|ctrf(?:\.json)?|oracle",
    re.IGNORECASE,
)
_PROTECTED = re.compile(r"(?<![\w.])/+(?:tests?|solution|oracle|logs/+verifier)\b", re.IGNORECASE)


def _sections(runbook: str) -> dict[str, list[str]]:
    """Lines under each heading, heading text removed; a line before the first is under ""."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in runbook.splitlines():
        heading = re.match(r"(?:#+\s*)?(\w+):\s*", line)
        if heading and heading[1].capitalize() in SECTIONS:
            current = heading[1].capitalize()
            line = line[heading.end() :]
            sections.setdefault(current, [])
        if line.strip() and line.strip() != "# Runbook":
            sections[current].append(line.strip())
    return sections


def _is_asked(artifact: str, instruction: str) -> bool:
    asked = artifacts(instruction) + [m[1] for m in _NAMED.finditer(instruction)]
    if artifact in asked:
        return True
    named = artifact.rsplit("/", 1)[-1] in {a.rsplit("/", 1)[-1] for a in asked}
    return named and all(part in words(instruction) for part in artifact.split("/") if part)


def review(instruction: str, runbook: str, private: Sequence[str] = ("submit",)) -> list[str]:
    """The deterministic reviewer; reads the public instruction and the runbook, nothing else.

    Reasons, each once: `missing section: S`, `over one page`, `answer literal: W`,
    `private command: W`, `artifact not asked for: P`, `mentions verification: W`. A word that the
    instruction itself spells as a whole (`tests.txt`) is no mention; the protected directories are
    always one.
    """
    sections = _sections(runbook)
    known, spelled = words(instruction), set(WORD.findall(instruction))
    reasons = [f"missing section: {s}" for s in SECTIONS if not sections.get(s)]
    if len(runbook.splitlines()) > MAX_LINES or len(runbook) > MAX_CHARACTERS:
        reasons.append("over one page")
    reasons += [f"mentions verification: {m[0]}" for m in _PROTECTED.finditer(runbook)]
    secret = {p.split()[0] for p in private} - spelled
    for section, lines in sections.items():
        for line in lines:
            step = re.fullmatch(r"\d+\.\s+(.*)", line) if section == "Steps" else None
            text = step[1] if step else line
            if step:
                unknown = [text[start:end] for start, end in literals(text, known)]
            else:
                found = WORD.findall(text.replace(HOLE, " "))
                unknown = [w for w in found if w not in known and w.lower() not in PROSE]
            checked = re.sub(r"(^|[;&|(]\s*|\b(?:if|while|do|then)\s+)test\s", r"\1", text) if step else text
            mentions = [w for w in WORD.findall(checked) if w not in spelled and _VERIFICATION.fullmatch(w)]
            used = [w for w in WORD.findall(text) if w in secret]
            reasons += [f"private command: {w}" for w in used]
            reasons += [f"mentions verification: {w}" for w in mentions]
            reasons += [f"answer literal: {w}" for w in unknown if w not in mentions and w not in used]
    if sections.get("Steps") and not any(re.match(r"\d+\.\s+\S", line) for line in sections["Steps"]):
        reasons.append("missing section: Steps")
    for path in " ".join(sections.get("Artifacts", [])).split():
        if path != "none" and not _is_asked(path, instruction):
            reasons.append(f"artifact not asked for: {path}")
    return list(dict.fromkeys(reasons))


def write_runbook(
    planner: Planner, reviewer: Reviewer, instruction: str, exchanges: Sequence[Exchange], revisions: int = 1
) -> tuple[str | None, list[list[str]]]:
    """Plan, review, revise: the approved runbook or None, and the reviewer's reasons of every round."""
    rounds: list[list[str]] = []
    objections: list[str] = []
    for _ in range(revisions + 1):
        runbook = planner(instruction, exchanges, tuple(objections))
        reasons = reviewer(instruction, runbook)
        rounds.append(reasons)
        if not reasons:
            return runbook, rounds
        objections += reasons
    return None, rounds
