"""A question: what a task asks, how it is solved, and what its copies must show for it to be a fair one.

Owns: the type that the levels make and the check that gold is right on all copies and a constant on none.
Called by: `quick`, `standard`, `deep`, `judge`, `environment`.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

from springtide.suites.db.copies import COPIES, Copies

MAX_ANSWER_ROWS = 1000
_MOST_ROWS, _MOST_CHANGES = 12, 400  # of an answer that is a list, and of one that writes
_STEP = 1_000  # instructions between two looks at the budget
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Question:
    """`text` is the instruction and `skeleton` the same without its entities. `entities` are the names it utters.

    `lookups` are the statements gold runs before `answer`, the statement it commits. `writes`: the answer changes the
    database, and what counts is the state. `ordered`: the order of rows counts. `unique`: statements that must give 1
    on every copy (no ties, a name that names one row).
    """

    text: str
    skeleton: str
    entities: tuple[str, ...]
    lookups: tuple[str, ...]
    answer: str
    copies: Copies = field(repr=False)
    writes: bool = False
    ordered: bool = False
    unique: tuple[str, ...] = ()


def is_fair(question: Question, all_differ: bool, budget: int | None = None) -> bool:
    """Whether gold is right and no constant is. Asked once, when the suite's data is built.

    `budget`: the instructions that all statements together may take on a copy; a policy's own budget is no smaller.

    Every `unique` statement gives 1 on each copy. A writing answer changes some values of each. Another's result on the
    original holds no NULL, is neither empty nor zero nor long, and differs on a perturbed copy (on each, with
    `all_differ`).
    """
    answers: list[Rows] = []
    for copy in range(COPIES):
        connection = question.copies.open(copy)
        if budget is not None:
            limit(connection, budget)
        try:
            if any(connection.execute(sql).fetchone() != (1,) for sql in question.unique):
                return False
            if question.writes:
                if not _changes_something(connection, question.answer):
                    return False
                continue
            answers.append(connection.execute(question.answer).fetchmany(_MOST_ROWS + 1))
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                return False
            raise
        finally:
            connection.close()
        first = answers[0]
        if not 0 < len(first) <= _MOST_ROWS or any(v is None for row in first for v in row) or first == [(0,)]:
            return False
        if all_differ and copy and answers[copy] == first:
            return False
    return question.writes or any(other != answers[0] for other in answers[1:])


def _changes_something(connection: sqlite3.Connection, sql: str) -> bool:
    """Whether a write leaves its table other than it was: setting what was so already is no task."""
    table = written_table(sql)
    before = connection.execute(f"SELECT * FROM {table}").fetchall()
    changed = connection.execute(sql).rowcount
    return 0 < changed <= _MOST_CHANGES and connection.execute(f"SELECT * FROM {table}").fetchall() != before


def limit(connection: sqlite3.Connection, budget: int) -> None:
    """All that runs on it from now on takes at most `budget` instructions together, then fails as interrupted."""
    ticks = iter(range(budget // _STEP))
    connection.set_progress_handler(lambda: next(ticks, None) is None, _STEP)


def written_table(sql: str) -> str:
    """The table that a gold statement writes to."""
    return sql.removeprefix("UPDATE ").removeprefix("DELETE FROM ").removeprefix("INSERT INTO ").split()[0]


def literal(value: Any) -> str:
    """A value as an SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


def sentence(text: str, **parts: str) -> tuple[str, str]:
    """An instruction from its template, and its skeleton. Upper-case parts are entities, the others concepts."""
    blank = {name: "_" if name.isupper() else part for name, part in parts.items()}
    return text.format(**parts), text.format(**blank)
