"""The databases: their concepts, their rows, and which rows and names belong to which side of the train/test cut.

Owns: `catalog.toml` and `data/*.json.gz`, read once a process. Invariants: a row of a cut table is on one side only,
a name that an instruction may utter belongs to one side in all databases; both follow from hashes of the text, so they
are the same in every process.
Called by: `recipes` (concepts only, no rows), `library` (rows).
"""

from __future__ import annotations

import functools
import gzip
import json
import tomllib
import zlib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

Role = Literal["id", "label", "ref", "number", "cat", "text"]
Side = Literal["train", "test", "ood"]
Row = tuple[Any, ...]

GROUPS: dict[str, tuple[str, ...]] = {
    "main": ("chinook", "movies", "world", "flights", "cars"),
    "ood": (
        "concerts", "museums", "orchestras", "shops", "kennels", "battles", "television", "poker", "courses", "pets",
        "schools",
    ),
    # The levels `hard` and `expert` ask about these as well; what is `ood` at one level is so at every level.
    "deep": ("baseball", "geography", "departures", "indicators"),
    "deep_ood": ("elements", "penguins", "sprint", "stocks", "transcripts", "documents", "properties"),
}  # fmt: skip
# What lies together in one schema at `expert`, and what each is called: in a question, and before its tables' names.
WAREHOUSES: tuple[tuple[str, ...], ...] = (
    ("chinook", "baseball", "flights"),
    ("world", "geography", "movies", "departures", "cars", "indicators"),
    ("elements", "transcripts", "concerts", "kennels", "pets", "stocks"),
    (
        "penguins", "sprint", "documents", "properties", "museums", "orchestras", "shops", "battles", "television",
        "poker", "courses", "schools",
    ),
)  # fmt: skip
ABOUT: dict[str, tuple[str, str]] = {
    "chinook": ("music store", "music"), "movies": ("film archive", "film"), "world": ("world atlas", "atlas"),
    "flights": ("airline routes", "route"), "cars": ("car catalogue", "car"), "baseball": ("baseball records", "ball"),
    "geography": ("gazetteer", "geo"), "departures": ("New York departures", "dep"),
    "indicators": ("development indicators", "dev"), "concerts": ("concert hall", "hall"),
    "museums": ("museum visits", "mus"), "orchestras": ("orchestras", "orch"), "shops": ("shop staff", "shop"),
    "kennels": ("dog kennels", "dog"), "battles": ("naval battles", "war"), "television": ("television guide", "tv"),
    "poker": ("poker tour", "pkr"), "courses": ("evening school", "eve"), "pets": ("student pets", "pet"),
    "schools": ("high school network", "net"), "elements": ("chemistry tables", "chem"),
    "penguins": ("penguin study", "peng"), "sprint": ("Olympic sprints", "oly"), "stocks": ("stock quotes", "stk"),
    "transcripts": ("university register", "univ"), "documents": ("document store", "doc"),
    "properties": ("estate agency", "est"),
}  # fmt: skip
_TEST_PERCENT = 30


@dataclass(frozen=True)
class Column:
    """A column by its concept: `to` is the table a `ref` points at; `words` are its names, the commonest first."""

    name: str
    role: Role
    words: tuple[str, ...]
    to: str | None = None


@dataclass(frozen=True)
class Table:
    """A table by its concept; `owner` and `dates` (columns that hold days) as in catalog.toml."""

    name: str
    words: tuple[str, ...]
    owner: str | None
    columns: tuple[Column, ...]
    dates: tuple[str, ...] = ()

    @property
    def label(self) -> Column | None:
        return next((c for c in self.columns if c.role == "label"), None)

    @property
    def key(self) -> Column | None:
        return next((c for c in self.columns if c.role == "id"), None)

    def column(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    def index(self, name: str) -> int:
        return next(i for i, c in enumerate(self.columns) if c.name == name)

    def having(self, *roles: Role) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.role in roles)


@dataclass(frozen=True)
class Database:
    """The concepts of one database."""

    name: str
    tables: dict[str, Table]


@functools.cache
def databases() -> dict[str, Database]:
    """Every database of the catalog, by name. Raises: ValueError if a reference or an owner leads nowhere."""
    spec = tomllib.loads((resources.files(__package__) / "catalog.toml").read_text("utf-8"))
    return {name: _database(name, tables) for name, tables in spec.items()}


def _database(name: str, spec: dict[str, Any]) -> Database:
    tables: dict[str, Table] = {}
    for table, fields in spec.items():
        columns = []
        for text in fields["columns"]:
            role, source, *words = text.split(" ", 2)
            column, _, target = source.partition(">")
            column = column.split("=")[0]
            to = (target or column) if role == "ref" else None
            given = tuple(words[0].split("|")) if words else tuple(spec[to]["words"]) if to in spec else (column,)
            columns.append(Column(column, role, given, to))
        tables[table] = Table(
            table, tuple(fields["words"]), fields.get("owner"), tuple(columns), tuple(fields.get("dates", ()))
        )
    for made in tables.values():
        for column in made.columns:
            if column.to is not None and column.to not in tables:
                raise ValueError(f"catalog.toml: {name}.{made.name}.{column.name} points at {column.to}, no table")
        if made.owner not in (None, "shared") and made.owner not in {c.name for c in made.having("ref")}:
            raise ValueError(f"catalog.toml: {name}.{made.name} is owned by {made.owner}, which is no reference of it")
    return Database(name, tables)


def warehouse_of(name: str) -> tuple[str, ...]:
    """The databases that share a schema with this one."""
    return next(members for members in WAREHOUSES if name in members)


@functools.cache
def warehouse(members: tuple[str, ...]) -> Database:
    """Several databases as one, whose tables are called `database__table`."""
    tables = {
        f"{name}__{table.name}": replace(table, name=f"{name}__{table.name}")
        for name in members
        for table in databases()[name].tables.values()
    }
    return Database("+".join(members), tables)


def side_of(text: Any) -> Side:
    """The side that may utter this name: a fixed hash of the text, blind to case."""
    return "test" if zlib.crc32(f"db:{text}".casefold().encode()) % 100 < _TEST_PERCENT else "train"


def may_name(side: Side, text: Any) -> bool:
    """Whether an instruction of `side` may contain `text`; on `ood`, whose databases are its own, anything."""
    return side == "ood" or side_of(text) == side


def read_rows(name: str) -> dict[str, list[Row]]:
    """All rows of a database by table, in the columns' order. Raises: FileNotFoundError without its data file."""
    raw = (resources.files(__package__) / "data" / f"{name}.json.gz").read_bytes()
    loaded = json.loads(gzip.decompress(raw))
    for table in databases()[name].tables.values():
        if loaded[table.name]["columns"] != [c.name for c in table.columns]:
            raise ValueError(f"data/{name}.json.gz: {table.name} differs from catalog.toml; run build_db_data.py")
    return {table: [tuple(row) for row in content["rows"]] for table, content in loaded.items()}


def cut_rows(database: Database, rows: dict[str, list[Row]], side: Side) -> dict[str, list[Row]]:
    """The rows of one side: each goes where its owner goes, and none points at a row that is not there."""
    if side == "ood":
        return rows
    kept: dict[str, list[Row]] = {}

    def keep(name: str) -> list[Row]:
        if name not in kept:
            table = database.tables[name]
            chosen = rows[name]
            if table.owner is None:
                by = table.label or table.columns[0]
                at = table.index(by.name)
                chosen = [row for row in chosen if side_of(row[at]) == side]
            for column in table.having("ref"):
                target = database.tables[str(column.to)]
                if column.to == name or target.key is None:
                    continue
                there = {row[target.index(target.key.name)] for row in keep(target.name)}
                at = table.index(column.name)
                owned = column.name == table.owner
                chosen = [row for row in chosen if row[at] in there or (row[at] is None and not owned)]
            kept[name] = chosen
        return kept[name]

    for name in database.tables:
        keep(name)
    return kept
