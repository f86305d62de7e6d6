"""Terminus that goes on: a declared completion is judged and, if wrong, the attempt continues.

For discovery on training tasks only. The model learns one bit, never a check's name or count.
"""

from rsi.harness.terminus import Terminus


class Rsrt(Terminus):
    """At most `asks` judgements an attempt; text and prompt are Terminus'."""

    name = "rsrt"
    asks = 2
