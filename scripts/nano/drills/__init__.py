"""Drills: made-up tasks in the form of the suites' quick level, with the calls that solve them.

Owns nothing but the three makers. A drill has the suites' grammar and tool syntax, and contents drawn at random:
schemas, relations, rooms and names that no suite has, mixed with the words of the training side. What it teaches is a
skill (copy an unseen name, bind it to its place in a call, choose the column or relation that the question names, read
the next argument from a reply, search until found), never a fact of a task. Invariant: the maker knows the answer
because it made the world, and never asks a suite's environment for one.
Called by: the builder, tests.
"""

import random
from collections.abc import Callable

from scripts.nano.dialogue import Dialogue
from scripts.nano.drills.db import db_drill
from scripts.nano.drills.household import household_drill
from scripts.nano.drills.kg import kg_drill
from scripts.nano.drills.words import Lexicon

DRILLS: dict[str, Callable[[random.Random, Lexicon], Dialogue]] = {
    "db": db_drill,
    "kg": kg_drill,
    "household": household_drill,
}
__all__ = ["DRILLS", "Lexicon"]
