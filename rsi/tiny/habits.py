"""How often the transcripts do the right thing: the one table to tune the base model's success with.

Per step kind the share of right commands at its habit point, in `terminus` and in `bash`. The two are
complementary (where one is usually right the other is usually wrong), so that discovery in several
harnesses finds more than one alone. Evaluation is in `terminus`: a kind above one half there is what greedy
decoding gets right. Kinds that are missing have no habit.
"""

RIGHT: dict[str, tuple[float, float]] = {
    "reverse": (0.25, 0.58),
    "unique": (0.58, 0.25),
    "flip": (0.55, 0.25),
    "last": (0.25, 0.55),
    "count": (0.22, 0.50),
    "drop": (0.30, 0.50),
    "column": (0.30, 0.55),
    "join": (0.30, 0.45),
    "move": (0.28, 0.58),
    "clean": (0.25, 0.55),
    "empty": (0.30, 0.25),
    "replace": (0.25, 0.58),
    "set": (0.30, 0.50),
    "append": (0.58, 0.25),
    "prepend": (0.25, 0.50),
    "delete": (0.30, 0.25),
    "run": (0.58, 0.25),
    "pick": (0.35, 0.55),
    "tally": (0.40, 0.55),
    "flow": (0.30, 0.50),
}

REDO_RIGHT = 0.50  # at a habit point, after having been told that the task is not solved
RUNBOOK_RIGHT = 0.50  # at a habit point of a transcript that carries a runbook: it follows the runbook either way
SLIP = 0.012  # a step: forgotten, or done with a wrong name, independently of everything else
RUNBOOK_SLIP = 0.006

TERMINUS_SHARE = 0.50  # of the transcripts, those with a runbook included
RUNBOOK_SHARE = 0.50  # of the terminus ones
BASH_SHARE = 0.30  # the rest goes on after being told NOT_SOLVED, as rsrt does
