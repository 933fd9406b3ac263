"""Questions of the level `quick`: one fact, count, extreme or change in a view of two or three small tables.

Owns: the kinds of question and the views they are asked about. Invariants: the gold is at least three calls (list the
tables, list the columns, commit; `parent` looks up a key in between); every choice it makes can be read from the
question and the replies; names and values that must be copied are short.
Called by: `environment`.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from springtide.suites.db.catalog import Database, Row, Side, Table, databases, may_name
from springtide.suites.db.copies import COPIES, SmallCopies, change_values
from springtide.suites.db.library import Library
from springtide.suites.db.naming import Names, draw_names, plural
from springtide.suites.db.question import Question, literal, sentence
from springtide.suites.db.recipes import Recipe

_SHORT = 14  # characters of a name or value a quick task may show
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .&/+-]*")
_TEXTS = {
    "lookup": ("{col} of {table} '{X}'?", "What is the {col} of {table} '{X}'?"),
    "cat": ("How many {tables} have {col} '{V}'?", "Count the {tables} with {col} '{V}'."),
    "over": ("How many {tables} have {col} over {N}?", "Count the {tables} with {col} over {N}."),
    "under": ("How many {tables} have {col} under {N}?",),
    "top": ("Which {table} has the highest {col}?",),
    "low": ("Which {table} has the lowest {col}?",),
    "update": ("Set the {col} of {table} '{X}' to {W}.", "Change {col} of {table} '{X}' to {W}."),
    "parent": ("{col} of the {parent} of {table} '{X}'?",),
}


def short(value: Any) -> bool:
    """Whether a value is fit to be copied by a small model: ASCII, short, no quotes."""
    if isinstance(value, str):
        return len(value) <= _SHORT and _PLAIN.fullmatch(value) is not None
    return value is not None and value >= 0 and len(repr(value)) <= 9


def make(recipe: Recipe, side: Side, library: Library, rng: random.Random) -> Question | None:
    """One try at a question for this recipe; None if this draw has too little to ask about. It may still be unfair."""
    database = databases()[recipe.database]
    table, column = database.tables[recipe.table], recipe.column
    parent = database.tables[str(table.column(recipe.ref).to)] if recipe.ref else None
    view = _view(database, table, column, parent, recipe, rng)
    rows = _sample(view, recipe, side, library, rng)
    if rows is None:
        return None
    names = draw_names(view, "quick", rng)
    question = _ask(recipe, view, rows, names, side, library, rng)
    if question is None:
        return None
    changed = [rows, *(_perturb(view, rows, recipe, side, library, rng) for _ in range(COPIES - 1))]
    return replace(question, copies=SmallCopies(view, names, tuple(changed)))


def _view(
    database: Database, table: Table, column: str, parent: Table | None, recipe: Recipe, rng: random.Random
) -> tuple[Table, ...]:
    """Two or three tables with three or four columns each: the one asked about, its parent, others."""
    others = [t for t in database.tables.values() if t not in (table, parent)]
    more = 1 if parent else rng.choice((1, 1, 2))
    if parent and rng.random() < 0.5:
        more = 0
    views = [_columns(table, {recipe.ref} if parent else {column}, rng)]
    if parent:
        views.append(_columns(parent, {column}, rng))
    views += [_columns(t, set(), rng) for t in rng.sample(others, min(more, len(others)))]
    rng.shuffle(views)
    return tuple(views)


def _columns(table: Table, needed: set[str], rng: random.Random) -> Table:
    """The table with the needed columns, its key and label, and one or two more."""
    kept = [c for c in table.columns if c.role in ("id", "label") or c.name in needed]
    others = [c for c in table.columns if c not in kept and c.role != "ref"]
    if len(kept) + len(others) < 2:  # a table that only links two others
        kept, others = list(table.columns), []
    kept += rng.sample(others, min(len(others), max(0, rng.choice((3, 4)) - len(kept))))
    rest = [c for c in kept if c.role != "id"]
    rng.shuffle(rest)
    return replace(table, columns=(*(c for c in kept if c.role == "id"), *rest))


def _sample(
    view: tuple[Table, ...], recipe: Recipe, side: Side, library: Library, rng: random.Random
) -> dict[str, list[Row]] | None:
    """A few rows of each table in the view's columns; a parent has the rows its children point at."""
    database = databases()[recipe.database]
    out: dict[str, list[Row]] = {}
    for table in sorted(view, key=lambda t: t.name != recipe.table):
        whole = database.tables[table.name]
        rows = library.rows(database.name, side)[table.name]
        at = [whole.index(c.name) for c in table.columns]
        must = [i for i in at if whole.columns[i].role != "id"] if table.name in (recipe.table, recipe.parent) else []
        label = whole.index(whole.label.name) if whole.label else None
        want = rng.randint(5, 7) if table.name == recipe.table else 4
        wanted: set[Any] = set()
        if table.name == recipe.parent:
            child = next(t for t in view if t.name == recipe.table)
            wanted = {row[child.index(recipe.ref)] for row in out[recipe.table]}
        picked: list[Row] = []
        labels: set[Any] = set()
        # Indices rather than a shuffled copy: tables have thousands of rows and few are looked at.
        order = range(len(rows)) if wanted else rng.sample(range(len(rows)), min(len(rows), 200))
        key = whole.index(whole.key.name) if whole.key else None
        for index in order:
            row = rows[index]
            if wanted and (key is None or row[key] not in wanted):
                continue
            if any(not short(row[i]) for i in must) or (label is not None and not short(row[label])):
                continue
            if label is not None and str(row[label]).lower() in labels:
                continue
            labels.add(str(row[label]).lower() if label is not None else index)
            picked.append(tuple(row[i] for i in at))
            if not wanted and len(picked) == want:
                break
        if len(picked) < (3 if table.name == recipe.table else 1):
            return None
        out[table.name] = picked
    return out


def _ask(
    recipe: Recipe,
    view: tuple[Table, ...],
    rows: dict[str, list[Row]],
    names: Names,
    side: Side,
    library: Library,
    rng: random.Random,
) -> Question | None:
    """The question, its gold and what it must not be ambiguous about; its copies are filled in later."""
    table = next(t for t in view if t.name == recipe.table)
    parent = next((t for t in view if t.name == recipe.parent), None)
    column = (parent or table).column(recipe.column)
    mine = rows[table.name]
    label = table.label
    t, c = names.tables[table.name], names.columns[(parent or table).name, column.name]
    lab = names.columns[table.name, label.name] if label else ""
    lookups = ["PRAGMA table_list", f"PRAGMA table_info({t})"]
    parts = {"table": table.words[0], "tables": plural(table.words[0]), "col": column.words[0]}
    unique: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    writes = False

    if recipe.kind in ("lookup", "update", "parent"):
        assert label is not None
        named = [row for row in mine if may_name(side, row[table.index(label.name)])]
        if not named:
            return None
        row = rng.choice(named)
        name = str(row[table.index(label.name)])
        parts["X"], entities = name, (name,)
        if recipe.kind == "lookup":
            answer = f"SELECT {c} FROM {t} WHERE {lab}='{name}'"
        elif recipe.kind == "update":
            pool = [v for v in library.pool(recipe.database, side, table.name, column.name) if short(v)]
            pool = [
                v for v in pool if v != row[table.index(column.name)] and (not isinstance(v, str) or may_name(side, v))
            ]
            if not pool:
                return None
            value = rng.choice(pool)
            parts["W"] = literal(value)
            entities += (value,) if isinstance(value, str) else ()
            answer, writes = f"UPDATE {t} SET {c}={literal(value)} WHERE {lab}='{name}'", True
        else:
            assert parent is not None and parent.key is not None
            ref, key = names.columns[table.name, recipe.ref], names.columns[parent.name, parent.key.name]
            owner = row[table.index(recipe.ref)]
            parts["parent"] = parent.words[0]
            lookups.append(f"SELECT {ref} FROM {t} WHERE {lab}='{name}'")
            lookups.append(f"PRAGMA table_info({names.tables[parent.name]})")
            answer = f"SELECT {c} FROM {names.tables[parent.name]} WHERE {key}={literal(owner)}"
    elif recipe.kind == "cat":
        values = sorted({row[table.index(column.name)] for row in mine})
        values = [v for v in values if may_name(side, v)]
        if not values:
            return None
        value = rng.choice(values)
        parts["V"], entities = str(value), (str(value),)
        answer = f"SELECT COUNT(*) FROM {t} WHERE {c}='{value}'"
    elif recipe.kind in ("over", "under"):
        numbers = sorted({row[table.index(column.name)] for row in mine})[1:-1]
        if not numbers:
            return None
        bound = rng.choice(numbers)
        parts["N"] = literal(bound)
        answer = f"SELECT COUNT(*) FROM {t} WHERE {c}{'>' if recipe.kind == 'over' else '<'}{literal(bound)}"
    else:
        best, way = ("max", " DESC") if recipe.kind == "top" else ("min", "")
        answer = f"SELECT {lab} FROM {t} ORDER BY {c}{way} LIMIT 1"
        unique = (f"SELECT COUNT(*) FROM {t} WHERE {c}=(SELECT {best}({c}) FROM {t})",)

    text, skeleton = sentence(rng.choice(_TEXTS[recipe.kind]), **parts)
    empty = SmallCopies((), names, ())
    return Question(text, skeleton, entities, tuple(lookups), answer, empty, writes, unique=unique)


def _perturb(
    view: tuple[Table, ...],
    rows: dict[str, list[Row]],
    recipe: Recipe,
    side: Side,
    library: Library,
    rng: random.Random,
) -> dict[str, list[Row]]:
    """Other values in every column but keys, references and labels (but the parent's label, if asked for)."""
    out: dict[str, list[Row]] = {}
    for table in view:
        mine = rows[table.name]
        pools: dict[str, list[Any]] = {}
        for at, column in enumerate(table.columns):
            asked = table.name == recipe.parent and column.name == recipe.column
            if column.role in ("id", "ref") or (column.role == "label" and not asked):
                continue
            values = [row[at] for row in mine]
            if column.role == "number" or asked or recipe.kind == "lookup":
                pool = library.pool(recipe.database, side, table.name, column.name)
                values += [v for v in rng.sample(pool, min(len(pool), 20)) if short(v)]
            pools[column.name] = values
        out[table.name] = change_values(table, mine, pools, frozenset(), rng)
    return out
