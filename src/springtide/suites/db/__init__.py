"""The `db` suite: questions and changes over real SQLite databases, answered by SQL that must hold on perturbed copies.

`SUITE` is what the registry loads. The databases are read when a worker opens them, not on import.
"""

from __future__ import annotations

from springtide.env import Suite
from springtide.suites.db.environment import DatabaseTasks

SUITE = Suite.of(DatabaseTasks)

__all__ = ["SUITE", "DatabaseTasks"]
