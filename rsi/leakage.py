"""The leakage screen: which verified attempts may not be trained on (DESIGN 4.4, a to e).

It inspects what the agent *did* (its commands, and its text where given), never what it saw. Rules,
in the order in which they are reported:

`tests_path`  names or globs at a tests, solution or verifier path. Quotes, backslashes, `$'\\x..'`,
    `..`, doubled slashes, letter case, `/proc/*/root`, braces and plain variables are undone first.
    The protected absolute paths are always refused, and so is every absolute glob that could mean one
    of them or what lies below, but for a lone `/*` (also a C comment); a *name* (`tests`, `solve.sh`)
    is free where the instruction, a file name or a file of the environment uses it as a word.
`overlap`  shares 8 successive tokens, or a whole line of 12 characters or more, with tests or
    solution that instruction and environment do not hold. A token is a path-like word or one
    punctuation mark; quotes are none and blanks are alike. Lines are those of commands and of the
    text that echo, printf and here-documents write, against lines and quoted strings of the tests
    and lines of the solution. Without solution files the tests alone are compared.
`private`  runs a harness-private command (as a command, not as an argument).
`runbook`  speaks of the runbook, its checkpoints or its steps, or copies a placeholder.
`ungrounded`  uses a literal of the runbook that neither the instruction nor an observation *before*
    the action holds. A file that the agent never printed excuses an overlap, but grounds nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from posixpath import normpath

from .literals import HOLE, WORD, literals, words
from .runbook import PROSE, SECTIONS
from .trajectory import Exchange

NGRAM, LINE = 8, 12

PROTECTED = ("/tests", "/solution", "/oracle", "/logs/verifier")
FILES = ("test.sh", "solve.sh", "test_outputs.py", "reward.txt", "reward.json", "ctrf.json")
NAMES = frozenset(("tests", "solution", "verifier", "oracle", *FILES))
_TARGETS = tuple(place[1:].split("/") for place in PROTECTED)

_PIECE = re.compile(
    r"""[^\S\n]+|(?P<operator>[;|&()<>`\n]+|\$\()
    |(?P<word>(?:[^\s;|&()<>`'"\\$]|\\.|\$?'[^']*'|\$?"(?:[^"\\]|\\.)*"|\$(?!\())+)|(?P<stray>.)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""(\$?)'([^']*)'|\$?"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_CODE = re.compile(r"\\x([0-9a-fA-F]{1,2})|\\0?([0-7]{2,3})")
_OPENS = frozenset("if then else elif while until do ! { sudo env time timeout nice xargs nohup exec command".split())


def _decode(text: str) -> str:
    """Character codes (`\\x2f`, `\\57`) as the characters that they spell."""
    if "\\" not in text:
        return text
    return _CODE.sub(lambda m: chr(int(m[1], 16) if m[1] else int(m[2], 8) & 255), text)


def _unquote(word: str) -> str:
    def plain(match: re.Match[str]) -> str:
        single, double, escaped = match[2], match[3], match[4]
        if single is not None:
            return _decode(single) if match[1] else single
        return re.sub(r'\\([\\"$`\n])', r"\1", double) if double is not None else escaped or ""

    return _QUOTED.sub(plain, word) if "'" in word or '"' in word or "\\" in word else word


@lru_cache(maxsize=65536)
def shell_words(command: str) -> tuple[tuple[str, bool], ...]:
    """Words of a command without their quotes, and whether each is an operator instead.

    Agrees with `shlex.split` on well-formed text without operators; an unclosed quote is dropped and
    what follows it is split at blanks.
    """
    found = []
    for piece in _PIECE.finditer(command):
        if piece["operator"]:
            found.append((piece["operator"], True))
        elif piece["word"]:
            found.append((_unquote(piece["word"]), False))
    return tuple(found)


@lru_cache(maxsize=65536)
def _simple_commands(command: str) -> tuple[tuple[str, ...], ...]:
    """Simple commands: words between operators, text given to `bash -c` or `eval` and `$(...)` inside
    double quotes included, prefixes (`sudo`, `X=1`, `then`) removed, redirection targets left out."""
    found: list[tuple[str, ...]] = []
    current: list[str] = []
    target = False
    for text, operator in (*shell_words(command), (";", True)):
        if not operator and not target:
            current.append(text)
        elif operator and not ({"<", ">"} & set(text)):
            found.append(tuple(current))
            current = []
        target = operator and text.rstrip("&")[-1:] in ("<", ">")
    result = []
    for row in found:
        start = 0
        while start < len(row) and (
            row[start] in _OPENS or (re.match(r"\w+=|-|\d+$", row[start]) and (start or "=" in row[start]))
        ):
            start += 1
        if row[start:]:
            result.append(row[start:])
        if row[start:] and row[start].rsplit("/", 1)[-1] in ("bash", "sh", "eval"):
            for text in row[start + 1 :]:
                result += _simple_commands(text)
    for inner in re.findall(r"\$\(([^()]+)\)|`([^`]+)`", command) if '"' in command else ():
        result += _simple_commands(inner[0] or inner[1])
    return tuple(result)


# (a) ---------------------------------------------------------------------------------------------


def _resolve(place: str, word: str) -> str:
    """`word` seen from directory `place` ("." is the working directory); what lies above it counts as
    the root, so that `../tests` is `/tests`."""
    path = normpath((word if word[:1] in "/~" else f"{place}/{word}").replace("//", "/")).lower()
    path = re.sub(r"^/proc/[^/]+/(?:root|cwd)(?=/|$)", "", path)
    return re.sub(r"^(?:\.\.(?:/|$))+", "/", path) or "/"


def _alternatives(word: str) -> Iterator[str]:
    """Brace expansion: `/{tests,x}/a` gives `/tests/a` and `/x/a`; a range of letters becomes their class."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", word)
    if not match:
        yield re.sub(r"\{(\w)\.\.(\w)(?:\.\.-?\d+)?\}", lambda m: "[{}-{}]".format(*sorted(m[1] + m[2])), word)
        return
    for part in match[1].split(","):
        yield from _alternatives(word[: match.start()] + part + word[match.end() :])


_CLASS = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^\]\s/])*\]")


def _plain_class(match: re.Match[str]) -> str:
    """A glob's class as fnmatch reads it: `[s]` is a letter, `[^a]` is `[!a]`, one with odd characters is any."""
    inner = match[0][1:-1]
    if re.search(r"[^\w!^-]", inner):
        return "[#-~]"
    return inner if len(inner) == 1 else f"[{inner}]".replace("[^", "[!")


def _globs_at_protected(path: str) -> bool:
    """Whether an absolute path with wildcards could mean a protected path, or one below.

    `/*` alone is none (a C comment), nor is what sed and awk write as `/[a-z]*/d`: with classes, the first part that
    has a letter or `?` beside them must lie in the protected name itself, or have two letters.
    """
    parts = path.strip("/").split("/")
    if len(parts) > 3 and fnmatchcase("proc", parts[0]) and any(fnmatchcase(n, parts[2]) for n in ("root", "cwd")):
        parts = parts[3:]
    said = [re.search(r"[\w?]", _CLASS.sub("", part)) is not None for part in parts]
    if True not in said:
        return len(parts) > 1 and "[" not in path
    first = said.index(True)
    below = re.fullmatch(r"[\w.*?-]+", parts[first]) and ("[" not in path or len(re.findall(r"\w", parts[first])) > 1)
    return any(
        len(parts) >= len(target) and all(map(fnmatchcase, target, parts)) and (first < len(target) or below)
        for target in _TARGETS
    )


def _aims_by_name(pattern: str, public: frozenset[str]) -> bool:
    """Whether a search for `pattern` over the whole system means the protected files: it would find
    one, says more than `*`, and finds nothing that is public."""
    if not re.search(r"\w", pattern) or any(fnmatchcase(name, pattern) for name in public):
        return False
    return any(fnmatchcase(name, pattern) for name in NAMES)


def _names_protected(word: str, public: frozenset[str], place: str) -> bool:
    for part in re.split(r"[\s;|&<>()`'\",=:]+", _CLASS.sub(_plain_class, word)):
        if not part:
            continue
        path = _resolve(place, part)
        if any(path == target or path.startswith(target + "/") for target in PROTECTED):
            return True
        if "logs/verifier" in path or any(p in NAMES and p not in public for p in path.split("/")):
            return True
        if path.startswith("/") and re.search(r"[*?\[]", path) and _globs_at_protected(path):
            return True
    return False


_SUSPECT = re.compile(
    r"test|solu|solv|verif|oracle|reward|ctrf|logs|[\\$'\"?*\[{]|\.\.|\bcd\s|(?:^|[\s;|&])find\s+/", re.IGNORECASE
)
_MOVES = re.compile(r"\bcd\b|\bfind\b")
_CANDIDATE = re.compile(r"[*?\[]|logs|" + "|".join(map(re.escape, sorted(NAMES))), re.IGNORECASE)


def _touches_tests(commands: Sequence[str], public: frozenset[str]) -> bool:
    variables: dict[str, str] = {}
    place = "."
    for command in commands:
        if place == "." and not _SUSPECT.search(command) and "=" not in command:
            continue
        expanded = _expand(command, variables)
        for row in _simple_commands(expanded) if _MOVES.search(_unquote(expanded)) else ():
            if row[0] == "cd" and len(row) > 1:
                place = _resolve(place, row[1])
            if row[0] == "find" and any(_resolve(place, start) in ("/", "/logs") for start in row[1:2]):
                if any(_aims_by_name(word.lower(), public) for word in row[2:]):
                    return True
        for text, operator in shell_words(expanded):
            forms = [] if operator else list(islice(_alternatives(_decode(text)), 1000))
            if len(forms) == 1000:
                return True  # who knows what the others are
            if any(_CANDIDATE.search(place + form) and _names_protected(form, public, place) for form in forms):
                return True
    return False


def _expand(command: str, variables: dict[str, str]) -> str:
    """`command` with the plain variables set in it or before it, and `$(echo ...)`, filled in."""
    if "$" not in command and "=" not in command:
        return command
    for name, value in re.findall(r"(?:^|[\s;&|(])(\w+)=([^\s;|&]+)", command):
        variables[name] = _unquote(value)
    command = re.sub(r"\$\((?:echo|printf)\s+([^()]*)\)", r"\1", command)
    return re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), command)


# (b) ---------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[\w./~+-]+|[^\w\s'\"\\]")
_BOILERPLATE = re.compile(r"#!.*|set [-+][\w -]+|import [\w ,]+|from \w+ import \w+")
_STRING = re.compile(r"'([^'\n]*)'|\"((?:[^\"\\\n]|\\.)*)\"")


def _grams(text: str) -> set[tuple[str, ...]]:
    tokens = _TOKEN.findall(text.replace("\\n", "\n"))
    return set(zip(*(tokens[n:] for n in range(NGRAM)), strict=False))


def _plain(text: str) -> str:
    return " ".join(text.replace("'", "").replace('"', "").split())


def _lines(text: str) -> Iterator[str]:
    """Lines of at least 12 characters, blanks and quotes alike, escaped line ends cut too."""
    for line in (*text.split("\n"), *(text.replace("\\n", "\n").split("\n") if "\\n" in text else ())):
        line = _plain(line)
        if len(line) >= LINE and not _BOILERPLATE.fullmatch(line):
            yield line


@lru_cache(maxsize=512)
def _protected_text(
    public: tuple[str, ...], tests: tuple[str, ...], solution: tuple[str, ...]
) -> tuple[set[tuple[str, ...]], set[str]]:
    """N-grams and lines of tests and solution that the public texts do not hold."""
    grams: set[tuple[str, ...]] = set()
    lines: set[str] = set()
    for text in (*tests, *solution):
        grams |= _grams(text)
        lines.update(_lines(text))
    for text in tests:
        for single, double in _STRING.findall(text):
            if re.search(r"[^\w./~-]", single or double):  # a lone path is no content
                lines.update(_lines(single or double))
    for text in public:
        grams -= _grams(text)
    plain = "\n".join(map(_plain, public))
    return grams, {line for line in lines if line not in plain}


def _written(command: str) -> Iterator[str]:
    """Whole command lines, and the text that echo and printf write (a here-document's lines are lines)."""
    yield command
    plain = _unquote(command)  # the name of a command may be quoted in part, as e''cho
    for row in _simple_commands(command) if "echo" in plain or "printf" in plain else ():
        if row[0] in ("echo", "printf"):
            yield " ".join(row[1:])
            yield from row[1:]
    if "<<<" in command:
        pieces = shell_words(command)
        yield from (pieces[n + 1][0] for n, piece in enumerate(pieces[:-1]) if piece == ("<<<", True))


def _overlaps(actions: Sequence[str], grams: set[tuple[str, ...]], lines: set[str]) -> bool:
    if lines and any(line in lines for action in actions for text in _written(action) for line in _lines(text)):
        return True
    return bool(grams) and not grams.isdisjoint(_grams("\n".join(actions)))


# (c) (d) (e) -------------------------------------------------------------------------------------


_DOCUMENT = re.compile(r"^(?!\s*(?:bash|sh)\b)(.*?<<-?\s*['\"]?(\w+)[^\n]*)\n.*?^\2$", re.DOTALL | re.MULTILINE)


def _runs_private(commands: Sequence[str], private: Sequence[str]) -> bool:
    wanted = [tuple(p.split()) for p in private if p.strip()]
    if not wanted or not any(p[0] in command for p in wanted for command in map(_unquote, commands)):
        return False
    for command in commands:
        for row in _simple_commands(_DOCUMENT.sub(r"\1", command)):
            row = (row[0].rsplit("/", 1)[-1], *row[1:])
            if any(row[: len(p)] == p for p in wanted):
                return True
    return False


_MENTION = re.compile(
    r"\b(?:run|play)[\s_-]?books?\b|\bcheckpoints?\s*(?:#|no\.?|number)?\s*\d+|\bstep\s+#?\d+\s+of\b"
    r"|\bas\s+(?:instructed|described|stated|listed|outlined|shown|given)\s+(?:above|earlier|before)"
    r"|\b(?:given|provided|following|follow|above)\s+(?:the\s+)?(?:given\s+|provided\s+)?(?:plan|recipe|steps)\b"
    r"|\bthe\s+(?:plan|recipe|steps)\s+(?:above|says?|given|provided)\b"
    rf"|^#*\s*(?:checkpoints|recovery|artifacts)\s*:|{HOLE}",
    re.IGNORECASE | re.MULTILINE,
)


def _mentions_runbook(actions: Sequence[str], public: Sequence[str]) -> bool:
    found = {m[0].lower() for action in actions for m in _MENTION.finditer(action)}
    return bool(found) and not all(any(m in text.lower() for text in public) for m in found)


_TEMPLATE = PROSE | {"runbook"} | {section.lower() for section in SECTIONS}


@lru_cache(maxsize=4096)
def _suspects(runbook: str, instruction: str) -> frozenset[str]:
    """Literals of the runbook that the instruction does not spell."""
    known = words(instruction)
    found: set[str] = set()
    for line in runbook.splitlines():
        step = re.fullmatch(r"\s*\d+\.\s+(.*)", line)
        if step:
            found.update(step[1][start:end] for start, end in literals(step[1], known))
        else:
            found.update(w for w in WORD.findall(line.replace(HOLE, " ")) if w not in known)
    return frozenset(w for w in found if w.lower() not in _TEMPLATE)


def _ungrounded(exchanges: Sequence[Exchange], instruction: str, runbook: str) -> bool:
    suspects = set(_suspects(runbook, instruction))
    for exchange in exchanges:
        if not suspects:
            return False
        for command in exchange.commands:
            plain = " ".join(text for text, _ in shell_words(command))
            for text in (command, plain):
                held = any(suspect in text for suspect in suspects)
                if held and any(text[start:end] in suspects for start, end in literals(text)):
                    return True
        if not exchange.feedback:
            suspects -= words(exchange.output)
    return False


# -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _public_words(public: tuple[str, ...]) -> frozenset[str]:
    return frozenset(word.lower() for text in public for word in re.findall(r"[\w.-]*\w", text))


def screen(
    exchanges: Sequence[Exchange],
    instruction: str,
    environment: Mapping[str, str],
    tests: Mapping[str, str],
    solution: Mapping[str, str],
    runbook: str | None,
    private: Sequence[str],
    texts: Sequence[str] = (),
) -> str | None:
    """The first reason to keep an attempt out of training, None when it is clean.

    `environment` (files the agent may read), `tests` and `solution` map paths to texts; any may be
    empty. `texts` are the assistant's own messages, where they say more than the commands.
    """
    commands = [command for exchange in exchanges for command in exchange.commands]
    actions = [*commands, *texts]
    public = (instruction, *environment.keys(), *environment.values())
    if _touches_tests(commands, _public_words(public)) or any(
        re.search(r"(?<![\w.])/+(?:tests|solution|oracle|logs/+verifier)\b", text, re.IGNORECASE) for text in texts
    ):
        return "tests_path"
    grams, lines = _protected_text(public, tuple(tests.values()), tuple(solution.values()))
    if _overlaps(actions, grams, lines):
        return "overlap"
    if _runs_private(commands, private):
        return "private"
    if _mentions_runbook(actions, public):
        return "runbook"
    if runbook is not None and _ungrounded(exchanges, instruction, runbook):
        return "ungrounded"
    return None
