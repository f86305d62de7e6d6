"""Which words of a shell command carry its method, and which could carry an answer.

A shell command is cut into words at blanks, quotes, slashes and operators. A word is *method*
when it is a known command where a command stands, a shell keyword there, an option, a known awk
or sed word inside such a program, a short variable name, a system directory after a slash, a
file descriptor, a character range or a format letter. Everything else (path components, words,
numbers, parts of quoted strings) is a *literal*: known when the instruction spells it, else
replaced by `<value>`, which the executor fills in with what it observes. `sort` is method in
`sort a.txt` and a literal in `echo sort > answer.txt`, where it may be the answer; text that is
written into a `.sh` file is read as commands. Punctuation (`cut -d:`) is method.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

HOLE = "<value>"

COMMANDS = frozenset(
    "awk base64 basename bash bunzip2 bzip2 cat cd chgrp chmod chown cksum cmp column comm cp csplit cut"
    " date dd df diff dirname du echo egrep env eval exec exit expand export expr fgrep file find fmt fold"
    " gawk grep gunzip gzip head id install join jq kill less ln ls make md5sum mkdir mktemp more mv nl nohup"
    " numfmt od paste patch perl printf pwd python python3 read readlink realpath rev rm rmdir sed seq set"
    " sh sha1sum sha256sum shuf sleep sort source split stat sudo sum sync tac tail tar tee test time"
    " timeout touch tr true false truncate tsort uname unexpand uniq unlink unset unzip wait wc which whoami"
    " xargs xxd xz yes zcat zip mapfile shopt declare local return break continue".split()
)
KEYWORDS = frozenset("if then else elif fi for while until do done case esac function in".split())
PREFIXES = frozenset("if then else elif while until do sudo env time xargs nohup exec eval".split())
AWK_WORDS = frozenset(
    "BEGIN END FILENAME FNR FS NF NR OFS ORS RS SUBSEP delete else exit for getline gsub if in index int"
    " length match next print printf split sprintf sub substr tolower toupper while".split()
)
VARIABLES = frozenset(
    "line file path name word item dir key value field count total sum tmp row col HOME PWD PATH IFS".split()
)
SYSTEM = frozenset("dev null tmp usr bin etc home root opt var lib local stdin stdout stderr env app".split())
OPTIONS = frozenset(  # words after one or two dashes that are longer than a cluster of three letters
    "name iname path type exec print print0 delete maxdepth mindepth newer size empty perm prune not regex"
    " all append bytes characters chars check complement count create csv decode delimiter delimiters"
    " directory dictionary-order exclude expression extract fields field-separator file files follow force"
    " general-numeric-sort gzip help human-numeric-sort ignore-case in-place include interactive"
    " invert-match key line-regexp lines list max-count merge mode month-sort no-clobber null"
    " null-data numeric-sort only-matching output output-delimiter parents preserve quiet random-source"
    " recursive reference regexp regexp-extended repeated reverse separator serial silent skip-fields"
    " squeeze-repeats stable suffix symbolic target-directory truncate-set1 unique update verbose"
    " version-sort width with-filename no-filename word-regexp words xzvf czvf".split()
)
_SPELLED = "one two three four five six seven eight nine ten eleven twelve".split()
_ORDINAL = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
NUMBER_WORDS = {word: str(n) for row in (_SPELLED, _ORDINAL) for n, word in enumerate(row, 1)}

_WORD = r"\w+(?:\.\w+|-(?!\d)\w+|(?<!\d)-\w+)*"
WORD = re.compile(_WORD)
_PIECE = re.compile(
    rf"""(?P<hole><value>)
    |(?P<descriptor>(?<![^\s;|&(])[0-2](?=[<>])|[<>]&[0-2])
    |(?P<break>\n|\\n|\|\|?|&&?|;|\(|`|\{{(?=\s)|!(?=\s))
    |(?P<skip>\\[tsdwbrSWDB]|\[:\w+:\]|%[a-zA-Z%]|(?<![\w-])(?:a-z|A-Z|0-9)+(?![\w-])|<<-?['"]?EOF)
    |(?P<option>(?<![^\s'"(])--?(?P<flag>[A-Za-z][A-Za-z]*(?:-[A-Za-z]+)*\d*(?:(?<=print0)|(?<=set1)|(?<!\d))))
    |(?P<variable>\$\{{?\#?(?P<target>[A-Za-z_]\w*|\d+))
    |(?P<quote>(?<!\\)['"])
    |(?P<word>{_WORD})""",
    re.VERBOSE,
)
_SCRIPT_TARGET = re.compile(r"(?:>|\btee(?:\s+-a)?)\s*['\"]?[\w./~-]*\.(?:sh|bash)\b")
_NUMBER_AND_FLAGS = re.compile(r"(\d+)([a-zA-Z]{1,2})")


@lru_cache(maxsize=4096)
def words(text: str) -> frozenset[str]:
    """Words of `text` and their parts: `alpha.txt` also gives `alpha` and `txt`, `Sort` also `sort`,
    and a spelled number (`three`, `third`) also its digits."""
    found = set()
    for word in WORD.findall(text):
        for part in (word, *re.split(r"[._-]", word)):
            found.add(part)
            if part[1:].islower() or len(part) == 1:
                found.add(part.lower())
            if part.lower() in NUMBER_WORDS:
                found.add(NUMBER_WORDS[part.lower()])
    return frozenset(found - {""})


class _Reader:
    """One pass over a command that tells method from literals (see the module's docstring)."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.script = bool(_SCRIPT_TARGET.search(command))
        self.heredoc = "<<" in command.replace("<<<", "")
        self.document = False  # inside a here-document that is not a script
        self.quote = ""
        self.head = self.outer = ""
        self.starts = True  # a command may stand here

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and end of every literal."""
        for piece in _PIECE.finditer(self.command):
            kind = piece.lastgroup
            start, end = piece.span()
            if kind == "break":
                self.separate(piece[0], start)
            elif kind == "quote":
                self.turn_quote(piece[0])
            elif kind == "option":
                if len(piece["flag"]) > 3 and piece["flag"] not in OPTIONS:
                    yield piece.span("flag")
                self.starts = self.starts or piece["flag"] in ("exec", "execdir")
            elif kind == "variable":
                if not self.is_variable(piece["target"]):
                    yield piece.span("target")
            elif kind == "word":
                yield from self.word(piece[0], start, end)
            elif kind == "hole" and self.command[start - 1 : start] != "=":
                self.starts = False

    def runs_text(self) -> bool:
        written = self.script and self.outer in ("echo", "printf", "cat")
        return written or self.outer in ("bash", "sh", "eval")

    def separate(self, text: str, start: int) -> None:
        inner = self.command[start - 1 : start] == "$" and self.quote != "'"
        if self.document or (self.quote and not inner and not self.runs_text()):
            return
        if self.heredoc and text in ("\n", "\\n") and not self.quote:
            self.head = self.outer = "cat"  # what follows is the document's text
            self.starts = self.script
            self.document = not self.script
            return
        self.starts = True
        if not self.quote:
            self.outer = ""

    def turn_quote(self, mark: str) -> None:
        if not self.quote:
            self.quote = mark
            self.starts = self.starts or self.runs_text()
        elif self.quote == mark:
            self.quote = ""
            if self.runs_text():
                self.head, self.starts = self.outer, False

    def is_variable(self, name: str) -> bool:
        if name.isdigit():
            return self.head not in ("awk", "gawk") or name == "0"
        return len(name) == 1 or name in VARIABLES or (self.head in ("awk", "gawk") and name in AWK_WORDS)

    def word(self, word: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        left, right = self.command[start - 1 : start], self.command[end : end + 1]
        if self.starts and right == "=" and (len(word) == 1 or word in VARIABLES):
            return
        if self.starts and left != "=":
            if word in COMMANDS or word in KEYWORDS:
                self.begin(word)
                return
            if word.isdigit() and self.head in ("xargs", "timeout"):
                yield start, end
                return
            if right not in ("/", "."):
                self.starts = False
        if self.is_method(word, left, right, start):
            return
        both = _NUMBER_AND_FLAGS.fullmatch(word)
        if both and self.head == "sed" and both[1] == "1":
            return  # the address of the first line is a place, never text
        if both and self.head in ("sed", "sort"):
            end = start + both.end(1)
        yield start, end

    def begin(self, word: str) -> None:
        self.head = word
        if not self.quote and not self.outer:
            self.outer = word
        self.starts = word in PREFIXES or (self.script and word in ("echo", "printf") and not self.quote)

    def is_method(self, word: str, left: str, right: str, start: int) -> bool:
        single = len(word) == 1 and not word.isdigit()
        if word == "EOF" and self.command[start - 1 : start] in ("\n", "n", "<"):
            return True
        if left == "/" and (word in SYSTEM or (word in COMMANDS and self.command[:start].endswith("/bin/"))):
            return True
        if self.head in ("for", "read") and (single or word in VARIABLES or word == "in"):
            return True
        if self.head == "case" and word == "in":
            return True
        if self.head in ("awk", "gawk"):
            return word in AWK_WORDS or (single and bool(self.quote) and left != '"')
        if self.head in ("head", "tail") and word in ("1", "2"):
            return word == "1" or left == "+"  # "the first", "all but the first": never part of the output
        if self.head == "truncate" and word == "0":
            return True
        if self.head in ("sed", "sort") and left == ">" and self.command[:start].endswith(HOLE):
            return len(word) <= 2
        if self.head == "sed" and single:
            opens = left in ("", "'", '"', " ", ";", "{", "^") or left.isdigit()
            closes = right in ("", "'", '"', " ", ";", "}")
            return (word in "sy" and opens and right in "/|#,:!") or (word in "gpdIq" and closes and left in "/|#,:!$")
        if self.head == "chmod" and left in "+-=":
            return word in ("r", "w", "x", "rw", "rx", "rwx")
        return self.head == "find" and word in "fdl" and self.command[:start].endswith("-type ")


@lru_cache(maxsize=65536)
def _spans(command: str) -> tuple[tuple[int, int], ...]:
    return tuple(_Reader(command).spans())


def literals(command: str, known: frozenset[str] = frozenset()) -> list[tuple[int, int]]:
    """Spans of the words of `command` that are neither method nor in `known`."""
    return [(start, end) for start, end in _spans(command) if command[start:end] not in known]


def generalise(command: str, instruction: str) -> str:
    """`command` on one line, with `<value>` for every literal that `instruction` does not spell.

    `generalise("cut -d: -f2 in.txt", "Cut in.txt")` is `"cut -d: -f<value> in.txt"`.
    """
    known = words(instruction)
    text = command.strip().replace("\n", "\\n")
    while spans := literals(text, known):  # a replaced word may show that a later one is none of the method
        for start, end in reversed(spans):
            text = text[:start] + HOLE + text[end:]
    return re.sub(rf"{HOLE}(?: +{HOLE})+(?=[^'\"]*['\"]\s*(?:[|>&;)]|$))", HOLE, text)
