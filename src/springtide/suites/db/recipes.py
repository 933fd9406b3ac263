"""Recipes: which question can be asked of which tables and columns, from the concepts alone (no rows).

Invariants: the list of a (level, split) is the same in every process; `test` has the recipes of `train`; `ood` has
databases of its own, and kinds that no other split asks.
Called by: `environment` (a task names its recipe), `quick`, `standard`.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from springtide.suites.db.catalog import GROUPS, Database, Table, databases

QUICK = {"lookup": 30, "cat": 15, "over": 15, "top": 12, "update": 15, "parent": 13}
STANDARD = {
    "count": 12, "list": 10, "aggregate": 14, "facts": 8, "far": 8, "common": 8, "most": 8, "best": 10, "range": 8,
    "set": 8, "raise": 6, "insert": 7, "delete": 7,
}  # fmt: skip
# Kinds that only `ood` asks, beside all others.
QUICK_OOD = {"under": 12, "low": 12}
STANDARD_OOD = {"above": 12, "frequent": 10, "without": 8, "different": 12}


@dataclass(frozen=True)
class Recipe:
    """A kind of question and the concepts it is about; `ref` leads from `table` to `parent`."""

    kind: str
    database: str
    table: str
    column: str = ""
    ref: str = ""
    parent: str = ""
    other: str = ""

    @property
    def id(self) -> str:
        path = ".".join(p for p in (self.database, self.table, self.column, self.ref, self.parent, self.other) if p)
        return f"{self.kind}:{path}"


def draw_kind(level: str, split: str, rng: random.Random) -> str:
    """A kind of question of this level and split, by weight."""
    kinds = _table(level, split)[0]
    return rng.choices(list(kinds), list(kinds.values()))[0]


def recipes(level: str, split: str) -> dict[str, list[Recipe]]:
    """All recipes by kind."""
    return _table(level, split)[1]


@functools.cache
def _table(level: str, split: str) -> tuple[dict[str, int], dict[str, list[Recipe]]]:
    kinds = dict(QUICK if level == "quick" else STANDARD)
    if split == "ood":
        kinds |= QUICK_OOD if level == "quick" else STANDARD_OOD
    names = GROUPS["ood" if split == "ood" else "main"]
    make = _quick if level == "quick" else _standard
    found: dict[str, list[Recipe]] = {kind: [] for kind in kinds}
    for name in names:
        for recipe in make(databases()[name]):
            if recipe.kind in found:
                found[recipe.kind].append(recipe)
    return {kind: weight for kind, weight in kinds.items() if found[kind]}, found


def _quick(database: Database) -> list[Recipe]:
    out = []
    for table in database.tables.values():
        name = table.name
        if table.label:
            out += [Recipe("lookup", database.name, name, c.name) for c in table.having("number", "cat", "text")]
            out += [Recipe("update", database.name, name, c.name) for c in table.having("number", "cat")]
            for kind in ("top", "low"):
                out += [Recipe(kind, database.name, name, c.name) for c in table.having("number")]
            for ref, parent in _links(database, table):
                out += [
                    Recipe("parent", database.name, name, c.name, ref, parent.name)
                    for c in parent.having("label", "number", "cat", "text")
                ]
        out += [Recipe("cat", database.name, name, c.name) for c in table.having("cat")]
        for kind in ("over", "under"):
            out += [Recipe(kind, database.name, name, c.name) for c in table.having("number")]
    return out


def _links(database: Database, table: Table) -> list[tuple[str, Table]]:
    """The references of a table to a table with a key; of two to the same table neither, a question could mean both."""
    refs = table.having("ref")
    return [
        (c.name, database.tables[str(c.to)])
        for c in refs
        if database.tables[str(c.to)].key and c.to != table.name and sum(c.to == other.to for other in refs) == 1
    ]


def _standard(database: Database) -> list[Recipe]:
    out = []
    for table in database.tables.values():
        here = (database.name, table.name)
        numbers, cats = table.having("number"), table.having("cat")
        for ref, parent in _links(database, table):
            link = {"ref": ref, "parent": parent.name}
            if parent.label:
                out += [Recipe("count", *here, **link), Recipe("without", *here, **link)]
                out += [Recipe(kind, *here, n.name, **link) for n in numbers for kind in ("aggregate", "raise", "most")]
                out += [Recipe("delete", *here, n.name, **link) for n in numbers]
                if table.label:
                    out += [Recipe("list", *here, **link)]
            if table.label:
                out += [Recipe("facts", *here, c.name, **link) for c in parent.having("label", "number", "cat")]
            out += [
                Recipe("far", *here, other=far.name, ref=ref, parent=parent.name, column=up)
                for up, far in _links(database, parent)
                if far.label and far.name not in (table.name, parent.name)
            ]
        for cat in cats:
            out += [Recipe(kind, *here, n.name, other=cat.name) for n in numbers for kind in ("common", "range", "set")]
            out += [Recipe("different", *here, n.name, other=cat.name) for n in numbers]
            out += [Recipe("frequent", *here, other=cat.name)]
            if table.label:
                out += [Recipe("best", *here, n.name, other=cat.name) for n in numbers]
        out += [Recipe("above", *here, n.name) for n in numbers]
        if table.key and table.label:
            out += [Recipe("insert", *here, c.name) for c in table.having("number", "cat", "text")]
    return out
