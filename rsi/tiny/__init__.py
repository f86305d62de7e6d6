"""The embedded default: task families, imperfect transcripts, tokenizer and pretraining."""

from rsi.tiny.pretrain import pretrain
from rsi.tiny.tasks import FAMILIES, Split, generate, write_task
from rsi.tiny.tokenizer import build_tokenizer

__all__ = ["FAMILIES", "Split", "build_tokenizer", "generate", "pretrain", "write_task"]
