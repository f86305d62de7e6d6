"""A byte-level BPE of about 1,000 tokens, trained on the synthetic transcripts.

Names are tokens of their own and never carry a space, so a name is the same token wherever it stands; the
harness' scaffolding is a token each. The space goes to what stands between names (`.txt > ` is one token).
Any text is encodable and decodes to itself.
"""

import random
import re
from collections import Counter

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rsi.chat import SPECIAL_TOKENS
from rsi.harness import NOT_SOLVED
from rsi.tiny.tasks import FAMILIES, draw
from rsi.tiny.transcripts import HARNESSES, Line, draw_form, transcript
from rsi.tiny.words import KEYS, WORDS

SAMPLE = 800  # transcripts to train on
LONGEST = 16  # characters of a token
REPEATS = 20  # a piece of text counts at most this often: rare commands get tokens too


def scaffolding() -> list[str]:
    """What the harnesses and ChatML write around commands, from the harnesses themselves."""
    mark = "X"
    parts = ["system\n", "user\n", "assistant\n", NOT_SOLVED]
    for harness in HARNESSES.values():
        parts += harness.write([mark], False).split(mark) + harness.write([mark], False, mark).split(mark)
        done = harness.write([], True)
        parts.append(done.removeprefix("```bash\n").removesuffix("\n```"))
    return [part for part in dict.fromkeys(parts) if part]


def sample_transcripts(count: int, seed: int) -> list[list[Line]]:
    """Transcripts of training tasks, every family alike."""
    rng = random.Random(seed)
    families = [(family, suite) for suite, members in FAMILIES.items() for family in members]
    lines = []
    for number in range(count):
        harness, runbook = draw_form(rng)
        lines.append(transcript(draw(*families[number % len(families)], rng, "train"), harness, rng, runbook))
    return lines


def build_tokenizer(vocab_size: int = 1024) -> Tokenizer:
    """Train the tokenizer; `SPECIAL_TOKENS` get the ids 0, 1, 2. Always gives the same one.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes and the whole names.
    """
    whole = scaffolding()
    names = [*WORDS, *KEYS]
    room = vocab_size - len(whole) - len(names)
    if room < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size {vocab_size} is too small: at least {vocab_size - room + 259} are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST,
        show_progress=False,
    )
    apart = re.compile("|".join([*map(re.escape, whole), rf"\b(?:{'|'.join(names)})\b"]))
    texts = (line.content for lines in sample_transcripts(SAMPLE, 0) for line in lines)
    pieces = Counter(piece for text in texts for piece in apart.split(text) if piece)
    repeated = (piece for piece, count in pieces.items() for _ in range(min(count, REPEATS)))
    tokenizer.train_from_iterator(repeated, trainer)
    tokenizer.add_tokens([AddedToken(name, single_word=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in whole])
    return tokenizer
