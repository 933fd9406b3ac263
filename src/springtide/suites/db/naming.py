"""Schema variants: the names that one task's tables and columns bear, drawn by its seed.

Invariants: names are plain identifiers that need no quotes, unique in their table, and near a word of their concept;
the same draw gives the same names.
Called by: `quick`, `standard`, `deep`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from springtide.suites.db.catalog import Column, Table

# SQLite's keywords that a drawn name could hit (checked against all words in tests/test_suite_db.py).
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "add all and as by case column cross default delete desc drop each end exists for from group having if in index"
        " insert into is join key like limit natural no not null of on or order plan references release right row rows"
        " select set show table then to union unique update using values view when where with without",
    )
)
_SYNONYM = {"quick": 0.1, "standard": 0.5, "hard": 0.5, "expert": 0.6}
_SHORTENED = 0.3  # of the words of an `expert` schema


@dataclass(frozen=True)
class Names:
    """Names by concept: `tables[table]`, `columns[table, column]`."""

    tables: dict[str, str]
    columns: dict[tuple[str, str], str]

    def fill(self, sql: str) -> str:
        """`{track}` becomes the table's name, `{track.price}` its column's, qualified, `{:track.price}` unqualified."""

        def name(match: re.Match[str]) -> str:
            bare, table, column = match[1], match[2], match[3]
            if column is None:
                return self.tables[table]
            return self.columns[table, column] if bare else f"{self.tables[table]}.{self.columns[table, column]}"

        return re.sub(r"\{(:?)(\w+)(?:\.(\w+))?\}", name, sql)


def plain_names(tables: Iterable[Table]) -> Names:
    """The catalog's own names, which the cached originals bear."""
    tables = list(tables)
    return Names({t.name: t.name for t in tables}, {(t.name, c.name): c.name for t in tables for c in t.columns})


def draw_names(tables: Iterable[Table], level: str, rng: random.Random, prefix: str = "") -> Names:
    """A schema variant: one way of joining words for the whole schema, affixes and synonyms for each name.

    At `expert` columns bear no affix (many tables have a `name` and a `year`) and words may be shortened. `prefix`
    stands before every table's name.
    """
    case = rng.choice(_CASES[level])
    synonym = _SYNONYM[level]
    tables = list(tables)
    word = {t.name: _word(t.words, synonym, rng) for t in tables}
    named: dict[str, str] = {}
    columns: dict[tuple[str, str], str] = {}
    for table in tables:
        parts = _table_parts(word[table.name], rng)
        if level == "expert":
            parts = [prefix, *(_shorten(part, rng) for part in parts)]
        named[table.name] = _unique(parts, case, named.values())
    for table in tables:
        used: list[str] = []
        for column in table.columns:
            target = word.get(column.to or "")
            stem = target if target and column.words == _words_of(tables, column) else _word(column.words, synonym, rng)
            if level != "expert":
                parts = _column_parts(column, stem, word[table.name], rng)
            else:
                parts = [_shorten(stem, rng), *(["id"] if column.role == "ref" else [])]
            name = _unique(parts, case, used)
            used.append(name)
            columns[table.name, column.name] = name
    return Names(named, columns)


def plural(word: str) -> str:
    """The plural of a concept's word, as instructions and table names use it."""
    if word.endswith(("s", "staff")):
        return word
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("x", "ch", "sh")) else "s")


# At `quick` every name is made of the words a question uses, in lower case where they begin: they are what is copied.
_CASES = {"quick": ("snake", "snake", "camel")} | dict.fromkeys(
    ("standard", "hard", "expert"), ("snake", "snake", "camel", "pascal", "upper")
)


def _words_of(tables: list[Table], column: Column) -> tuple[str, ...]:
    return next((t.words for t in tables if t.name == column.to), ())


def _word(words: tuple[str, ...], synonym: float, rng: random.Random) -> str:
    return rng.choice(words[1:]) if len(words) > 1 and rng.random() < synonym else words[0]


def _table_parts(word: str, rng: random.Random) -> list[str]:
    return rng.choice(([word], [plural(word)], ["tbl", word], [word, "data"], [word, "list"]))


def _column_parts(column: Column, word: str, owner: str, rng: random.Random) -> list[str]:
    if column.role == "ref":
        return rng.choice(([word, "id"], [word, "id"], [word, "ref"], ["id", word]))
    return rng.choice(([word], [owner, word], [owner[0], word]))


def _shorten(word: str, rng: random.Random) -> str:
    """Some words without their inner vowels, as old schemas have them: population, ppltn."""
    if rng.random() >= _SHORTENED:
        return word
    return " ".join(part if len(part) < 6 else part[0] + re.sub("[aeiou]", "", part[1:]) for part in word.split())


def _unique(parts: list[str], case: str, used: Iterable[str]) -> str:
    """The parts joined in this case; a keyword or a taken name gets one part more."""
    taken = {name.lower() for name in used}
    name = _join(parts, case)
    while name.lower() in _KEYWORDS or name.lower() in taken:
        parts = [*parts, "col" if name.lower() in _KEYWORDS else "b"]
        name = _join(parts, case)
    return name


def _join(parts: list[str], case: str) -> str:
    words = [w for part in parts for w in re.split(r"[ _]", part)]
    if case in ("snake", "upper"):
        name = "_".join(words)
        return name.upper() if case == "upper" else name
    name = "".join(w[:1].upper() + w[1:] for w in words)
    return name if case == "pascal" else name[:1].lower() + name[1:]
