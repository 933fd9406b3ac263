"""The three copies of a task's database: the original and two perturbed ones, in the task's schema variant.

Owns: how copies are made and changed. Invariants: the three have the same tables, columns, keys and labels in the
columns a task may name; other values differ; opening one never touches another.
Called by: `quick` and `standard` (make them), `environment` and `judge` (open them).
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from springtide.suites.db.catalog import Column, Database, Row, Table
from springtide.suites.db.naming import Names

COPIES = 3


class Copies(Protocol):
    """`open(k)`: a fresh in-memory database of copy k (0: the original); whoever opens it closes it."""

    def open(self, copy: int) -> sqlite3.Connection: ...


@dataclass(frozen=True)
class SmallCopies:
    """Copies small enough to build from rows: `tables` in their view's columns, `rows[k][table]`."""

    tables: tuple[Table, ...]
    names: Names
    rows: tuple[dict[str, list[Row]], ...]

    def open(self, copy: int) -> sqlite3.Connection:
        connection = connect()
        fill(connection, self.tables, self.names, self.rows[copy])
        return connection


@dataclass(frozen=True)
class ImageCopies:
    """Copies of a whole database: a serialized image each, renamed on opening by rewriting the schema table alone."""

    database: Database
    names: Names
    images: tuple[bytes, ...]

    def open(self, copy: int) -> sqlite3.Connection:
        connection = connect()
        connection.deserialize(self.images[copy])
        connection.execute("PRAGMA writable_schema = ON")
        for table in self.database.tables.values():
            name, sql = self.names.tables[table.name], create_table(table, self.names)
            connection.execute(
                "UPDATE sqlite_schema SET name = ?, tbl_name = ?, sql = ? WHERE name = ?", (name, name, sql, table.name)
            )
        connection.execute("PRAGMA writable_schema = RESET")
        return connection


def connect() -> sqlite3.Connection:
    """An empty in-memory database that commits every statement by itself."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def create_table(table: Table, names: Names) -> str:
    """The table's definition. No keys are declared: an image's pages must not depend on names."""
    columns = ", ".join(f"{names.columns[table.name, c.name]} {_type(c)}" for c in table.columns)
    return f"CREATE TABLE {names.tables[table.name]} ({columns})"


def _type(column: Column) -> str:
    # A number keeps what it is (NUMERIC turns no whole number into a float); a key is text in some databases.
    return {"number": "NUMERIC", "id": "", "ref": ""}.get(column.role, "TEXT")


def fill(connection: sqlite3.Connection, tables: Sequence[Table], names: Names, rows: dict[str, list[Row]]) -> None:
    """Create the tables and insert their rows."""
    connection.execute("BEGIN")
    for table in tables:
        connection.execute(create_table(table, names))
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {names.tables[table.name]} VALUES ({marks})", rows[table.name])
    connection.execute("COMMIT")


def change_values(
    table: Table, rows: list[Row], pools: dict[str, list[Any]], frozen: frozenset[str], rng: random.Random
) -> list[Row]:
    """The rows with every value redrawn from its column's pool, but keys, references, labels and `frozen` columns.

    A column that is in `pools` is redrawn whatever its role is, so a label may be changed by giving it a pool.
    """
    fixed = [c.name in frozen or c.name not in pools or not pools[c.name] for c in table.columns]
    return [
        tuple(v if keep else rng.choice(pools[c.name]) for v, keep, c in zip(row, fixed, table.columns)) for row in rows
    ]


def change_database(
    database: Database, rows: dict[str, list[Row]], relink: bool, rng: random.Random
) -> dict[str, list[Row]]:
    """A perturbed whole database. Keys and labels stay; shared words trade places, numbers and dates are redrawn.

    `relink`: references trade their targets too. A tenth of the rows that nothing points at is left out.
    """
    pointed = {c.to for t in database.tables.values() for c in t.having("ref")}
    out: dict[str, list[Row]] = {}
    for table in database.tables.values():
        changed = rows[table.name]
        if table.name not in pointed and len(changed) > 4:
            changed = [row for row in changed if rng.random() > 0.1]
        columns = [list(values) for values in zip(*changed)]
        for at, column in enumerate(table.columns if changed else ()):
            values = columns[at]
            if column.role == "cat" or (column.role == "ref" and relink):
                distinct = sorted({v for v in values if v is not None}, key=str)
                traded = dict(zip(distinct, rng.sample(distinct, len(distinct))))
                # The tenth that is redrawn keeps counts from being invariant under the trade.
                columns[at] = [
                    None if v is None else rng.choice(distinct) if rng.random() < 0.1 else traded[v] for v in values
                ]
            elif column.role in ("number", "text"):
                columns[at] = [rng.choice(values) for _ in values]
        out[table.name] = [tuple(row) for row in zip(*columns)] if changed else []
    return out
