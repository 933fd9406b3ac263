"""What a worker process keeps of the databases: rows by side, value pools, and whole-database images.

Owns: the per-process caches, filled on first use. Invariants: nothing here is changed after it was made; the same
(database, side) gives the same rows and perturbations in every process.
Called by: `quick`, `standard`, `deep` through `Environment.shared`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from importlib import resources
from typing import Any

from springtide.suites.db import copies
from springtide.suites.db.catalog import Row, Side, Table, cut_rows, databases, read_rows, warehouse
from springtide.suites.db.naming import plain_names


class Library:
    """Rows, pools and images of every database, by side; and which draw of each task is the fair one."""

    def __init__(self) -> None:
        self._rows = functools.cache(read_rows)
        self.rows = functools.cache(self._cut)
        self.pool = functools.cache(self._pool)
        self.images = functools.cache(self._images)
        self.warehouse = functools.cache(self._warehouse)
        self.draws = functools.cache(self._draws)

    def _cut(self, database: str, side: Side) -> dict[str, list[Row]]:
        return cut_rows(databases()[database], self._rows(database), side)

    def _pool(self, database: str, side: Side, table: str, column: str) -> tuple[Any, ...]:
        """The distinct values of a column, NULL left out, in a fixed order."""
        at = databases()[database].tables[table].index(column)
        values = {row[at] for row in self.rows(database, side)[table]} - {None}
        return tuple(sorted(values, key=lambda v: (isinstance(v, str), v)))

    def _versions(self, database: str, side: Side) -> Iterator[dict[str, list[Row]]]:
        """The rows of the three copies: as they are, and twice perturbed."""
        concepts, original = databases()[database], self.rows(database, side)
        yield original
        for relink in (False, True):
            yield copies.change_database(concepts, original, relink, random.Random(f"{database}/{side}/{relink}"))

    def _images(self, database: str, side: Side) -> tuple[bytes, ...]:
        """The three copies as serialized databases that bear the catalog's names."""
        tables = list(databases()[database].tables.values())
        return tuple(_image(tables, rows) for rows in self._versions(database, side))

    def _warehouse(self, members: tuple[str, ...], side: Side) -> tuple[bytes, ...]:
        """The same of several databases in one schema."""
        tables = list(warehouse(members).tables.values())
        versions = zip(*(self._versions(name, side) for name in members))
        return tuple(
            _image(tables, {f"{name}__{t}": r for name, rows in zip(members, one) for t, r in rows.items()})
            for one in versions
        )

    def _draws(self, level: str, split: str) -> tuple[int, ...]:
        raw = (resources.files(__package__) / "data" / "draws.json").read_text("ascii")
        return tuple(json.loads(raw)[f"{level}/{split}"])


def _image(tables: list[Table], rows: dict[str, list[Row]]) -> bytes:
    connection = copies.connect()
    copies.fill(connection, tables, plain_names(tables), rows)
    image = bytes(connection.serialize())
    connection.close()
    return image
