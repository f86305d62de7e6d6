"""terminal-rsi: a language model gets better at terminal work by recursive self-improvement."""

__version__ = "0.1.0"
