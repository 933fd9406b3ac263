"""A guarded SQLite connection: what a policy may do to it, for how long, and how much of the answer it sees.

Owns: the authorizer, the instruction budget, size limits, the rendering of results. Invariants: no statement reads or
writes outside the in-memory database, changes its schema or its settings; a statement ends after a fixed number of
virtual-machine instructions, so that the limit does not depend on the machine's load (processor time is a second net);
a result is never longer than its limits; any thread may run a statement, one at a time, and closing ends the one that
runs. Everything a statement can do wrong is one `SqlError`.
Called by: `environment` (the policy's calls), `judge` (replay on the copies).
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import Any

Value = Any  # None, int, float, str, bytes
_READS = {
    sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE,
}  # fmt: skip
_WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info"}
# Nothing an answer needs: these reach outside, make an outcome depend on chance or on the build, or (printf with a
# width of a billion) spend half a minute inside one instruction, where no budget is looked at.
_NO_FUNCTIONS = {
    "load_extension", "random", "randomblob", "sqlite_version", "sqlite_source_id", "zeroblob", "printf", "format",
}  # fmt: skip
# Instructions between two looks at the budget. A look takes the interpreter lock, for which a thread may wait one
# whole switch interval of its worker (1 ms): at most 4,000 looks a statement keep that below the deadline of a call.
_STEP = 500
# A text function compares up to length squared bytes in one instruction: short values keep that to milliseconds, and
# processor time stops what still adds up.
_LONGEST_VALUE = 10_000
_MOST_CPU_S = 1.0
_INFO = re.compile(r"\s*PRAGMA\s+(?:main\s*\.\s*)?table_x?info\b", re.I)
_LIST = re.compile(r"\s*PRAGMA\s+(?:main\s*\.\s*)?table_list\b", re.I)


class SqlError(Exception):
    """A statement that failed or may not run. The text is one line, fit for the model."""


@dataclass(frozen=True)
class Caps:
    """`instructions`: virtual-machine steps of one statement. `rows`, `characters`: of a rendered result."""

    instructions: int = 2_000_000
    rows: int = 40
    characters: int = 800


@dataclass(frozen=True)
class Result:
    """Columns and rows of a statement, how many rows it changed (-1: a read), and whether rows were left out."""

    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    changed: int
    cut: bool


class GuardedConnection:
    """An in-memory database behind the guard. `touched` collects the names of tables that statements wrote to."""

    def __init__(self, connection: sqlite3.Connection, caps: Caps) -> None:
        self._connection, self._caps = connection, caps
        self.touched: set[str] = set()
        self._writing: set[str] = set()
        self._left, self._until = 0, 0.0
        self._refused = ""
        self._running = threading.Lock()
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
        connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(self._tick, _STEP)

    def run(self, sql: str, max_rows: int) -> Result:
        """Run one statement and fetch at most `max_rows` rows. Raises: SqlError."""
        with self._running:
            return self._run(sql, max_rows)

    def _run(self, sql: str, max_rows: int) -> Result:
        self._left, self._refused = self._caps.instructions // _STEP, ""
        self._until = time.thread_time() + _MOST_CPU_S
        self._writing = set()
        try:
            cursor = self._connection.execute(sql)
            rows = cursor.fetchmany(max_rows + 1)
            description = cursor.description
            changed = cursor.rowcount
            if description is not None and self._writing:
                cursor.fetchall()  # RETURNING: the statement takes effect only when it has run to its end
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise SqlError(self._explain(error)) from None
        self.touched |= self._writing
        columns = tuple(d[0] for d in description or ())
        return Result(columns, rows[:max_rows], changed if self._writing else -1, len(rows) > max_rows)

    def show(self, sql: str) -> str:
        """Run one statement and render what it gives, within the caps. Raises: SqlError."""
        result = self.run(sql, self._caps.rows)
        return render(sql, result, self._caps)

    def close(self) -> None:
        """Close the database; a statement that another thread runs on it ends with an error first."""
        self._connection.interrupt()
        with self._running:
            self._connection.close()

    def _authorize(
        self, action: int, first: str | None, second: str | None, where: str | None, inner: str | None
    ) -> int:
        if action in _READS:
            if action != sqlite3.SQLITE_FUNCTION or (second or "").lower() not in _NO_FUNCTIONS:
                return sqlite3.SQLITE_OK
            self._refused = f"function {second}"
        elif action in _WRITES and first and not first.lower().startswith("sqlite_"):
            self._writing.add(first)
            return sqlite3.SQLITE_OK
        elif action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
            return sqlite3.SQLITE_OK
        else:
            self._refused = f"PRAGMA {first}" if action == sqlite3.SQLITE_PRAGMA else _ACTIONS.get(action, "statement")
        return sqlite3.SQLITE_DENY

    def _tick(self) -> int:
        self._left -= 1
        if time.thread_time() > self._until:
            self._left = -1
        return int(self._left < 0)

    def _explain(self, error: BaseException) -> str:
        if self._refused:
            return f"Error: {self._refused} is not allowed"
        if self._left < 0:
            return "Error: the statement takes too long"
        return "Error: " + " ".join(str(error).split())[:100]


_ACTIONS = {
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT",
    sqlite3.SQLITE_ALTER_TABLE: "ALTER",
}


def render(sql: str, result: Result, caps: Caps) -> str:
    """A result as short text: values joined by " | ", rows by newlines, schema look-ups as names joined by spaces."""
    if result.changed >= 0 and not result.columns:
        return f"{result.changed} rows changed"
    if _INFO.match(sql):
        text = " ".join(str(row[1]) for row in result.rows)
    elif _LIST.match(sql):
        names = (str(row[1]) for row in result.rows if row[0] == "main")
        text = " ".join(sorted(name for name in names if not name.startswith("sqlite_")))
    else:
        text = "\n".join(" | ".join(map(show_value, row)) for row in result.rows)
    if not result.rows:
        return "no rows"
    if len(text) > caps.characters:
        return text[: caps.characters] + " ..."
    return text + ("\n..." if result.cut else "")


def show_value(value: Value) -> str:
    """One value as text, as it stands in an SQL result."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return str(value)
