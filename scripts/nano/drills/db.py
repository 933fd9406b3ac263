"""Drills in the form of `db`: find the table, find the columns, commit one statement.

Owns made-up schemas. Half of the concepts bear words of the training databases' catalog, half are pseudo-words; how
names are spelled (affixes, camelCase) is the suite's own `draw_names`. Rows do not exist: replies are names.
Called by: `drills.DRILLS`.
"""

from __future__ import annotations

import functools
import random

from scripts.nano.dialogue import Call, Dialogue, Signatures, Turn
from scripts.nano.drills.words import Lexicon

from springtide.suites.db.catalog import GROUPS, Column, Role, Table, databases
from springtide.suites.db.naming import draw_names, plural

TOOLS: Signatures = (("execute_sql", ("sql",)), ("commit_final_answer", ("sql",)))
_KINDS = {"lookup": 30, "cat": 15, "over": 15, "top": 12, "update": 15, "parent": 20}
_TEXTS = {
    "lookup": ("{col} of {table} '{x}'?", "What is the {col} of {table} '{x}'?"),
    "cat": ("How many {tables} have {col} '{x}'?", "Count the {tables} with {col} '{x}'."),
    "over": ("How many {tables} have {col} over {n}?", "Count the {tables} with {col} over {n}."),
    "top": ("Which {table} has the highest {col}?",),
    "update": ("Set the {col} of {table} '{x}' to {w}.", "Change {col} of {table} '{x}' to {w}."),
    "parent": ("{col} of the {parent} of {table} '{x}'?",),
}
_ASKED: dict[str, tuple[Role, ...]] = {
    "lookup": ("number", "cat", "text"),
    "cat": ("cat",),
    "over": ("number",),
    "top": ("number",),
    "update": ("number", "cat"),
    "parent": ("number", "cat", "text", "label"),
}
_REAL_WORD = 0.6
Words = tuple[str, ...]


def db_drill(rng: random.Random, lexicon: Lexicon) -> Dialogue:
    """One made-up question and its solution."""
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    asked_role: Role = rng.choice(_ASKED[kind])
    tables, asked = _schema(rng, lexicon, parent=kind == "parent", asked_role=asked_role)
    table, parent = tables[0], tables[1] if kind == "parent" else None
    shown = rng.sample(tables, len(tables))
    names = draw_names(shown, "quick", rng)
    t = names.tables[table.name]
    label = table.label
    assert label is not None
    lab = names.columns[table.name, label.name]
    c = names.columns[(parent or table).name, asked.name]
    x, number = lexicon.name(rng), _number(rng)
    w = f"'{lexicon.name(rng)}'" if asked.role != "number" else number
    text = rng.choice(_TEXTS[kind]).format(
        col=asked.words[0],
        table=table.words[0],
        tables=plural(table.words[0]),
        parent=parent.words[0] if parent else "",
        x=x,
        n=number,
        w=w,
    )
    turns = [
        Turn(_sql("PRAGMA table_list"), " ".join(sorted(names.tables.values()))),
        Turn(_sql(f"PRAGMA table_info({t})"), _columns(table, names.columns)),
    ]
    if parent:
        ref = names.columns[table.name, "ref"]
        key = names.columns[parent.name, "key"]
        p = names.tables[parent.name]
        value = rng.choice((str(rng.randint(1, 400)), str(rng.randint(1, 60)), _code(rng, lexicon)))
        turns.append(Turn(_sql(f"SELECT {ref} FROM {t} WHERE {lab}='{x}'"), value))
        turns.append(Turn(_sql(f"PRAGMA table_info({p})"), _columns(parent, names.columns)))
        literal = value if value.isdigit() else f"'{value}'"
        answer = f"SELECT {c} FROM {p} WHERE {key}={literal}"
    else:
        answer = {
            "lookup": f"SELECT {c} FROM {t} WHERE {lab}='{x}'",
            "cat": f"SELECT COUNT(*) FROM {t} WHERE {c}='{x}'",
            "over": f"SELECT COUNT(*) FROM {t} WHERE {c}>{number}",
            "top": f"SELECT {lab} FROM {t} ORDER BY {c} DESC LIMIT 1",
            "update": f"UPDATE {t} SET {c}={w} WHERE {lab}='{x}'",
        }[kind]
    turns.append(Turn(("commit_final_answer", {"sql": answer})))
    return Dialogue("db", TOOLS, text, tuple(turns))


def _sql(statement: str) -> Call:
    return ("execute_sql", {"sql": statement})


def _columns(table: Table, spelled: dict[tuple[str, str], str]) -> str:
    return " ".join(spelled[table.name, c.name] for c in table.columns)


def _schema(rng: random.Random, lexicon: Lexicon, parent: bool, asked_role: Role) -> tuple[list[Table], Column]:
    """Tables, the one asked about first (with a reference to the second, if `parent`), and the column asked for."""
    size = rng.choice((2, 2, 3))
    concepts = _concepts(rng, lexicon, _catalog()["table"], size)
    tables: list[Table] = []
    asked: Column | None = None
    for i, words in enumerate(concepts):
        wants = i == (1 if parent else 0)
        columns = [Column("key", "id", rng.choice((("id",), ("id",), ("id",), ("code",))))]
        label = Column("label", "label", rng.choice(_catalog()["label"]))
        rest = [label]
        roles: list[Role] = rng.choices(("cat", "number", "text"), k=rng.choice((0, 1, 1, 2)))
        if wants and asked_role == "label":
            asked = label
        elif wants:
            roles = [asked_role, *roles[:2]]
        for k, role in enumerate(roles):
            taken = {c.words for c in rest} | {(lab,) for lab in label.words}
            word = _concept(rng, lexicon, _catalog()[role])
            while word in taken:
                word = _concept(rng, lexicon, _catalog()[role])
            rest.append(Column(f"c{k}", role, word))
            if wants and k == 0 and asked is None:
                asked = rest[-1]
        if parent and i == 0:
            rest.append(Column("ref", "ref", concepts[1], to="t1"))
        rng.shuffle(rest)
        tables.append(Table(f"t{i}", words, None, (*columns, *rest)))
    assert asked is not None
    return tables, asked


def _concepts(rng: random.Random, lexicon: Lexicon, real: list[Words], count: int) -> list[Words]:
    """Concepts no two of which share a word."""
    found: list[Words] = []
    while len(found) < count:
        words = _concept(rng, lexicon, real)
        if not any(set(words) & set(other) for other in found):
            found.append(words)
    return found


def _concept(rng: random.Random, lexicon: Lexicon, real: list[Words]) -> Words:
    return rng.choice(real) if rng.random() < _REAL_WORD else (lexicon.word(rng),)


@functools.cache
def _catalog() -> dict[str, list[Words]]:
    """Words of the training databases' concepts, by role; `table` for tables."""
    found: dict[str, set[Words]] = {"table": set()}
    for name in GROUPS["main"]:
        for table in databases()[name].tables.values():
            found["table"].add(table.words)
            for column in table.columns:
                found.setdefault(column.role, set()).add(column.words)
    return {role: sorted(words) for role, words in found.items()}


def _number(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return repr(round(rng.uniform(0, 60), rng.choice((1, 2))))
    return str(rng.randint(1, 10 ** rng.choice((1, 2, 3, 4, 6))))


def _code(rng: random.Random, lexicon: Lexicon) -> str:
    return lexicon.word(rng).upper()[: rng.choice((2, 3, 3))]
