"""The shipped suites with tasks of all levels in one pool, from quick to expert.

Owns: the level `mixed` of each. A task keeps its own level, so it is played and judged as it is there. Called by:
`frontier`, as a suite by file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from springtide.env import Suite, Task
from springtide.suites.db import DatabaseTasks
from springtide.suites.household import SUITE as HOUSEHOLD
from springtide.suites.kg import KnowledgeGraph

if TYPE_CHECKING:
    from springtide.env import Environment

LEVELS = ("quick", "standard", "hard", "expert")
EACH = 30  # tasks of a level and split


def _mixed(environment: type[Environment]) -> Suite:
    """The suite `environment` with one more level: the first tasks of each of `LEVELS`, in turn."""

    def tasks(split: str, level: str) -> Sequence[Task]:
        if level != "mixed":
            return environment.tasks(split, level)
        lists = [environment.tasks(split, one) for one in LEVELS]
        return [of[i] for i in range(min(EACH, *map(len, lists))) for of in lists]

    return Suite(environment.name, environment.version, environment, (*environment.levels, "mixed"), tasks)


DB, KG, HOUSE = _mixed(DatabaseTasks), _mixed(KnowledgeGraph), _mixed(HOUSEHOLD.environment)
