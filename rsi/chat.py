"""Messages to token ids, in ChatML, so that a conversation only ever grows at its end.

Text is encoded once, when it enters; ids that the model sampled are kept as they are. A sampled turn ends
with ``<|im_end|>``; `Chat.observation` begins with the newline that the sampler never writes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, START, END)


class Message(NamedTuple):
    """One message of a conversation: `role` is system, user or assistant."""

    role: str
    content: str


class Chat:
    """ChatML over a tokenizer whose vocabulary holds `SPECIAL_TOKENS`.

    Special tokens are only ever written by this class: the same characters inside a message, an observation
    or a turn are encoded as ordinary text, so that no command output can end a turn or start another.
    (Tokens that a tokenizer adds without marking them special, such as Qwen's ``<think>``, stay tokens.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        missing = [token for token, token_id in special.items() if token_id is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no token {', '.join(missing)}: ChatML needs {', '.join(SPECIAL_TOKENS)}"
            )
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True
        self.pad, self.start, self.end = (token_id for token_id in special.values() if token_id is not None)
        self._newline = self._encode("\n")
        self._ask = [self.start, *self._encode("assistant\n")]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages, then of the header that asks the model for its turn."""
        return [token for message in messages for token in self._message(message)] + self._ask

    def observation(self, text: str) -> list[int]:
        """What follows a sampled `end`: the newline, `text` as a user message, and the next turn's header."""
        return [*self._newline, *self._message(Message("user", text)), *self._ask]

    def encode_turn(self, text: str) -> list[int]:
        """Ids of an assistant turn as the model would sample it: its text and `end`."""
        return [*self._encode(text), self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an assistant turn without its end token; bytes that are no UTF-8 become U+FFFD."""
        body = list(ids)
        if body and body[-1] == self.end:
            body.pop()
        return self.tokenizer.decode(body, skip_special_tokens=False)

    def _message(self, message: Message) -> list[int]:
        return [self.start, *self._encode(f"{message.role}\n{message.content}"), self.end, *self._newline]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
