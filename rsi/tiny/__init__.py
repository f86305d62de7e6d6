"""The embedded default: task families, imperfect transcripts, tokenizer and pretraining."""

from rsi.tiny.pretrain import optimizers, pretrain
from rsi.tiny.tasks import FAMILIES, Split, generate, write_task
from rsi.tiny.tokenizer import build_tokenizer

__all__ = ["FAMILIES", "Split", "build_tokenizer", "generate", "optimizers", "pretrain", "write_task"]
