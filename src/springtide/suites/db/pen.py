"""What the kinds of question are written with: concepts, words for them, and values of the task's own side to name.

Owns: `Pen` and `Draft`. A kind is a function from a pen to a draft: SQL over concepts (`{track.price}`) and the parts
of a sentence; `Draft.ask` puts it in a schema's names. Invariants: a value that a draft names belongs to the pen's
side; gold lists the tables, then the columns of each table it needs, then commits.
Called by: `standard`, `deep`, `hard`, `expert`, `changes`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from springtide.suites.db.catalog import Database, Side, Table, databases, may_name
from springtide.suites.db.copies import ImageCopies
from springtide.suites.db.library import Library
from springtide.suites.db.naming import Names, plural
from springtide.suites.db.question import Question, literal, sentence
from springtide.suites.db.recipes import Recipe

T = TypeVar("T")
_LONG = 48  # characters of a name a question may utter
_ENTITIES = ("X", "Y", "V", "W")  # the parts that name a row or a word; the other upper-case ones are bounds


class NothingToName(Exception):
    """This draw finds nothing that a question of its kind could name; draw on."""


@dataclass(frozen=True)
class Draft:
    """A question over concepts: `sql` in placeholders, `parts` for the sentence, `unique` as in `Question`."""

    texts: tuple[str, ...]
    sql: str
    parts: dict[str, str]
    unique: tuple[str, ...] = ()
    writes: bool = False
    ordered: bool = False

    def ask(
        self,
        names: Names,
        copies: ImageCopies,
        rng: random.Random,
        opening: str = "",
        more_unique: tuple[str, ...] = (),
    ) -> Question:
        """The question in the names of a schema. `opening`: words before it; `more_unique`: as `unique`."""
        used = [t for t in names.tables if re.search(rf"\{{:?{t}[.}}]", self.sql)]
        lookups = ("PRAGMA table_list", *(f"PRAGMA table_info({names.tables[t]})" for t in used))
        text, skeleton = sentence(opening + rng.choice(self.texts), **self.parts)
        # A bare number (a year, a size) is a bound, not a name: both sides may utter it.
        entities = tuple(v for k, v in self.parts.items() if k in _ENTITIES and not re.fullmatch(r"[\d.-]+", v))
        unique = tuple(names.fill(sql) for sql in (*self.unique, *more_unique))
        answer = names.fill(self.sql)
        return Question(text, skeleton, entities, lookups, answer, copies, self.writes, self.ordered, unique)


class Named(NamedTuple):
    """A row by its label: the name, the condition that finds it, the statement that says it is the only one."""

    name: str
    where: str
    single: str


class Pen:
    """What the kinds need to write their question: the concepts, words for them, and values to name."""

    def __init__(self, recipe: Recipe, side: Side, library: Library, rng: random.Random) -> None:
        self.recipe, self.side, self.library, self.rng = recipe, side, library, rng
        self.database: Database = databases()[recipe.database]
        self.table: Table = self.database.tables[recipe.table]
        self.parent: Table | None = self.database.tables[recipe.parent] if recipe.parent else None

    def word(self, words: tuple[str, ...]) -> str:
        return self.rng.choice(words[:2]) if self.rng.random() < 0.5 else words[0]

    def column(self, name: str, table: Table | None = None) -> str:
        return self.word((table or self.table).column(name).words)

    def value(self, table: Table, column: str) -> Any:
        """A value of this side that a question may utter; None if there is none."""
        pool = self.library.pool(self.database.name, self.side, table.name, column)
        if not pool:
            return None
        for _ in range(20):
            value = self.rng.choice(pool)
            if isinstance(value, str) and (
                len(value) > _LONG or re.search(r"[{}\n]", value) or not may_name(self.side, value)
            ):
                continue
            return value
        return None

    def bound(self, table: Table, column: str) -> Any:
        """A value from the middle of a number column."""
        pool = self.library.pool(self.database.name, self.side, table.name, column)
        middle = pool[len(pool) // 5 : max(len(pool) // 5 + 1, len(pool) * 4 // 5)]
        return self.rng.choice(middle) if middle else None

    def named(self, table: Table) -> tuple[str, str] | None:
        """A row by its label: its name, and the statement that says the name is one row's only."""
        label = table.label
        name = self.value(table, label.name) if label else None
        if name is None or label is None:
            return None
        one = f"SELECT COUNT(*) FROM {{{table.name}}} WHERE {{{table.name}.{label.name}}} = {literal(name)}"
        return str(name), one


class DeepPen(Pen):
    """A pen for recipes of `hard` and `expert`: every concept of the recipe as a placeholder and as a word.

    `t p f`: the table, its parent, the parent's parent; `key_*`, `label_*`: their key and label; `c cat day ref up`:
    the recipe's columns. All are qualified; `bare` drops the table, for SET lists and for sub-queries under an alias.
    What is asked for a value raises NothingToName where there is none.
    """

    def __init__(self, recipe: Recipe, side: Side, library: Library, rng: random.Random) -> None:
        super().__init__(recipe, side, library, rng)
        self.far: Table | None = self.database.tables[recipe.far] if recipe.far else None
        self.t, self.p, self.f = (f"{{{name}}}" for name in (recipe.table, recipe.parent, recipe.far))
        self.c, self.cat, self.day, self.ref = (
            self.of(self.table, name) for name in (recipe.column, recipe.other, recipe.day, recipe.ref)
        )
        self.key, self.label = self.key_of(self.table), self.label_of(self.table)
        self.key_p, self.label_p = self.key_of(self.parent), self.label_of(self.parent)
        self.key_f, self.label_f = self.key_of(self.far), self.label_of(self.far)
        self.link = f"{self.t} JOIN {self.p} ON {self.ref} = {self.key_p}"
        if self.far and self.parent:
            self.link += f" JOIN {self.f} ON {self.of(self.parent, recipe.up)} = {self.key_f}"

    @staticmethod
    def of(table: Table | None, column: str) -> str:
        return f"{{{table.name}.{column}}}" if table and column else ""

    def key_of(self, table: Table | None) -> str:
        return self.of(table, table.key.name) if table and table.key else ""

    def label_of(self, table: Table | None) -> str:
        return self.of(table, table.label.name) if table and table.label else ""

    def parts(self, **more: Any) -> dict[str, str]:
        """Words for all concepts of the recipe, and `more` (upper case: what the question names)."""
        recipe, out = self.recipe, {}
        for name, table in (("table", self.table), ("parent", self.parent), ("far", self.far)):
            if table is not None:
                word = self.word(table.words)
                out[name], out[name + "s"] = word, plural(word)
                if table.label:
                    out["label" if name == "table" else "label_" + name[0]] = self.word(table.label.words)
        for name, column in (("col", recipe.column), ("cat", recipe.other), ("date", recipe.day)):
            if column:
                out[name] = self.column(column)
        return out | {k: v if isinstance(v, str) else literal(v) for k, v in more.items()}

    def over(self) -> Any:
        """A bound of the recipe's number column."""
        return _there(self.bound(self.table, self.recipe.column))

    def value_of(self, column: str) -> Any:
        """A value of a column of the recipe's table."""
        return _there(self.value(self.table, column))

    def two_values(self, column: str) -> tuple[Any, Any]:
        """Two different values of a column of the recipe's table, the smaller first."""
        one, other = sorted((self.value_of(column), self.value_of(column)))
        return _differ(one, other)

    def one_of(self, table: Table | None) -> Named:
        """A row by name."""
        assert table is not None
        name, single = _there(self.named(table))
        return Named(name, f"{self.label_of(table)} = {literal(name)}", single)

    def two_of(self, table: Table | None) -> tuple[Named, Named]:
        """Two different rows by name."""
        return _differ(self.one_of(table), self.one_of(table))

    def shared(self) -> str:
        """A value of the recipe's word column."""
        return str(self.value_of(self.recipe.other))

    def two_shared(self) -> tuple[str, str]:
        """Two different values of the recipe's word column."""
        return _differ(self.shared(), self.shared())


def _there(value: T | None) -> T:
    if value is None:
        raise NothingToName
    return value


def _differ(one: T, other: T) -> tuple[T, T]:
    if one == other:
        raise NothingToName
    return one, other


def bare(sql: str) -> str:
    """The same columns without their tables."""
    return re.sub(r"\{(\w+\.\w+)\}", r"{:\1}", sql)


def alone(metric: str, group: str) -> str:
    """The statement that gives 1 if no other group has as much as the first."""
    found = f"SELECT {metric} AS n {group}"
    return f"SELECT COUNT(*) FROM ({found}) WHERE n = (SELECT MAX(n) FROM ({found}))"


def apart(metric: str, source: str, count: int, way: str = "DESC") -> str:
    """The statement that gives 1 if the first `count` values of a sorted source are all there and differ."""
    head = f"SELECT {metric} AS v {source} ORDER BY {metric} {way} LIMIT {count}"
    return f"SELECT COUNT(*) = COUNT(DISTINCT v) FROM ({head})"
