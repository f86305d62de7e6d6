"""Messages to token ids, in ChatML, so that a conversation only ever grows at its end.

Text is encoded once, when it enters; ids that the model sampled are kept as they are. A sampled turn ends
with ``<|im_end|>``; `Chat.observation` begins with the newline that the sampler never writes.

What a conversation grows into equals what the checkpoint's own template makes of the whole, except that the templates
of Qwen3 and 3.5 (and 3.6 unless told to preserve it) drop the thinking of a turn as soon as a user message follows,
and an empty one in any case. Here what was sampled stays; after tool responses theirs does too. Qwen3.8's is matched
at its `reasoning_effort` medium, which adds no sentence to the system message. Qwen3.5's writes an argument that is
true as `True`; here it is `true`, as from 3.6 on.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rsi.architecture import ModelConfig

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, START, END)
THINKING, NO_THINKING = "<think>\n", "<think>\n\n</think>\n\n"


class Message(NamedTuple):
    """One message of a conversation: `role` is system, user or assistant."""

    role: str
    content: str


class Call(NamedTuple):
    """A tool call of an assistant turn."""

    name: str
    arguments: Mapping[str, Any]


class Chat:
    """ChatML over a tokenizer whose vocabulary holds `SPECIAL_TOKENS`.

    Tokens of the form ``<…>`` (also those not marked special, such as Qwen's ``<think>``) are only ever written by
    this class or sampled by the model: the same characters inside a message or an observation are encoded as
    ordinary text, so that no command output can end a turn, start another or forge a tool's response.

    config: names the family, whose conventions hold if the tokenizer knows ``<think>``, and ids that end a turn beside
    `end`; without it plain ChatML. thinking: ask for it, where the checkpoint leaves the choice. template: its chat
    template, which tells whether it does; without one the family's first checkpoints do.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig | None = None, thinking: bool = False, template: str = ""
    ) -> None:
        special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        missing = [token for token, token_id in special.items() if token_id is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no token {', '.join(missing)}: ChatML needs {', '.join(SPECIAL_TOKENS)}"
            )
        self.pad, self.start, self.end = (token_id for token_id in special.values() if token_id is not None)
        self.stops = tuple(dict.fromkeys((self.end, *(config.stops if config else ()))))
        thinks = config is not None and tokenizer.token_to_id("<think>") is not None
        self.family = config.model_type if config and thinks else "qwen2"
        self.opening = _opening(template, self.family, thinking) if thinks else ""
        # Some files say to cut or pad what is encoded: a setting of whoever saved them.
        values = json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None}
        self.tokenizer = Tokenizer.from_str(json.dumps(values))
        self._ask = [self.start, *self.tokenizer.encode(f"assistant\n{self.opening}", add_special_tokens=False).ids]
        self.tokenizer.encode_special_tokens = True
        # Other added tokens are words: the embedded tokenizer has one for every name.
        for token in values["added_tokens"]:
            token["special"] |= bool(re.fullmatch(r"<[^<>]+>", token["content"]))
        self._text = Tokenizer.from_str(json.dumps(values))
        self._text.encode_special_tokens = True
        self._newline = self._encode("\n")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages, then of the header that asks the model for its turn."""
        return [token for message in messages for token in self._message(message)] + self._ask

    def observation(self, text: str) -> list[int]:
        """What follows a sampled `end`: the newline, `text` as a user message, and the next turn's header."""
        return [*self._newline, *self._message(Message("user", text)), *self._ask]

    def tool_responses(self, texts: Sequence[str]) -> list[int]:
        """As `observation`, for the results of the tools that a turn called, in one user message."""
        opening, closing = (self.tokenizer.token_to_id(mark) for mark in ("<tool_response>", "</tool_response>"))
        if opening is None or closing is None:  # Qwen2.5 writes them as text
            return self.observation("\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts))
        ids = [*self._newline, self.start, *self._encode("user\n")]
        for place, text in enumerate(texts):
            ids += self._newline if place else []
            ids += [opening, *self._encode(f"\n{self._trim(text)}\n"), closing]
        return [*ids, self.end, *self._newline, *self._ask]

    def write_call(self, call: Call) -> str:
        """The text of a tool call, in the family's form; `read_calls` is its inverse."""
        if self.family != "qwen3_5":
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
        written = "".join(
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            "\n</parameter>\n"
            for name, value in call.arguments.items()
        )
        return f"<tool_call>\n<function={call.name}>\n{written}</function>\n</tool_call>"

    def read_calls(self, text: str) -> list[Call]:
        """The tool calls of a turn. In Qwen3.5's form every argument comes back as the text that was written.

        Raises ValueError for a call that cannot be read, naming it: the model is to be told.
        """
        calls = []
        for body in re.findall(r"<tool_call>\n?(.*?)\n?</tool_call>", text, re.DOTALL):
            if self.family == "qwen3_5":
                function = re.fullmatch(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", body, re.DOTALL)
                if function is None:
                    raise ValueError(f"no <function=NAME> … </function> in the tool call {body!r}")
                values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
                calls.append(Call(function[1], dict(values)))
                continue
            try:
                found = json.loads(body)
                calls.append(Call(str(found["name"]), dict(found["arguments"])))
            except (ValueError, KeyError, TypeError) as problem:
                raise ValueError(f"the tool call {body!r} is no JSON of name and arguments ({problem})") from None
        return calls

    def encode_turn(self, text: str) -> list[int]:
        """Ids of an assistant turn as the model would sample it: its text and `end`."""
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an assistant turn without the token that ends it; bytes that are no UTF-8 become U+FFFD."""
        body = list(ids)
        if body and body[-1] in self.stops:
            body.pop()
        return self.tokenizer.decode(body, skip_special_tokens=False)

    def answer(self, text: str) -> str:
        """What a turn says after its thinking; nothing where that has no end."""
        thinks = self.opening == THINKING or text.lstrip().startswith("<think>")
        return text.partition("</think>")[2] if thinks else text

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """The text that each id completes, "" where it ends inside a character; joined, it is the decoded text.

        A character that the last id leaves unfinished is not part of any piece.
        """
        stream = DecodeStream(skip_special_tokens=False)
        for token in ids:
            yield stream.step(self.tokenizer, token) or ""

    def _message(self, message: Message) -> list[int]:
        content = self._encode(f"{message.role}\n{self._trim(message.content)}")
        return [self.start, *content, self.end, *self._newline]

    def _trim(self, text: str) -> str:
        return text.strip() if self.family == "qwen3_5" else text

    def _encode(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False).ids


def _opening(template: str, family: str, thinking: bool) -> str:
    """What the template writes after the header of the turn that it asks for."""
    if template and "enable_thinking" not in template:  # a checkpoint that always thinks, or never
        return THINKING if "<think>" in template.rpartition("add_generation_prompt")[2] else ""
    if family == "qwen2" or (family == "qwen3" and thinking):
        return ""
    return THINKING if thinking else NO_THINKING
