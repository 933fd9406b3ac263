"""Questions of the level `standard`: joins, aggregates, groups, orders and changes over a whole database.

Owns: the kinds of question and their SQL, written over concepts (`{track.price}`) and filled with a task's names.
Invariant: every question names an entity or a bound of its own side.
Called by: `environment`.
"""

from __future__ import annotations

import random
from typing import Any

from springtide.suites.db.catalog import Side, Table, may_name
from springtide.suites.db.copies import ImageCopies
from springtide.suites.db.library import Library
from springtide.suites.db.naming import draw_names, plural
from springtide.suites.db.pen import Draft, Pen, alone
from springtide.suites.db.question import Question, literal
from springtide.suites.db.recipes import Recipe


def make(recipe: Recipe, side: Side, library: Library, rng: random.Random) -> Question | None:
    """One try at a question for this recipe; None if this draw has nothing to name. It may still be unfair."""
    pen = Pen(recipe, side, library, rng)
    draft = _KINDS[recipe.kind](pen)
    if draft is None:
        return None
    names = draw_names(pen.database.tables.values(), "standard", rng)
    copies = ImageCopies(pen.database, names, library.images(recipe.database, side))
    return draft.ask(names, copies, rng)


def _link(pen: Pen) -> tuple[Table, str]:
    """The parent, and the join from the recipe's table to it."""
    parent = pen.parent
    assert parent is not None and parent.key is not None
    t, p = pen.table.name, parent.name
    return parent, f"{{{t}}} JOIN {{{p}}} ON {{{t}.{pen.recipe.ref}}} = {{{p}.{parent.key.name}}}"


def _words(pen: Pen, **more: str) -> dict[str, str]:
    word = pen.word(pen.table.words)
    return {"table": word, "tables": plural(word), **more}


def _of_parent(pen: Pen) -> tuple[dict[str, str], str, tuple[str, ...]] | None:
    """A question about the rows of one named parent: its words, FROM and WHERE, and that the name is unique."""
    parent, join = _link(pen)
    named = pen.named(parent)
    if named is None or parent.label is None:
        return None
    name, one = named
    parts = _words(pen, parent=pen.word(parent.words), X=name)
    return parts, f"FROM {join} WHERE {{{parent.name}.{parent.label.name}}} = {literal(name)}", (one,)


def _count(pen: Pen) -> Draft | None:
    found = _of_parent(pen)
    if found is None:
        return None
    parts, source, unique = found
    texts = (
        "How many {tables} does the {parent} '{X}' have?",
        "Count the {tables} that belong to the {parent} '{X}'.",
    )
    return Draft(texts, f"SELECT COUNT(*) {source}", parts, unique)


def _list(pen: Pen) -> Draft | None:
    found = _of_parent(pen)
    if found is None:
        return None
    parts, source, unique = found
    label = pen.table.label
    assert label is not None
    what = f"{{{pen.table.name}.{label.name}}}"
    parts["label"] = pen.word(label.words)
    texts = ("List the {label} of every {table} of the {parent} '{X}', in alphabetical order.",)
    return Draft(texts, f"SELECT {what} {source} ORDER BY {what}", parts, unique, ordered=True)


def _aggregate(pen: Pen) -> Draft | None:
    found = _of_parent(pen)
    if found is None:
        return None
    parts, source, unique = found
    word, function = pen.rng.choice((("total", "SUM"), ("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN")))
    parts |= {"word": word, "col": pen.column(pen.recipe.column)}
    texts = (
        "What is the {word} {col} of the {tables} of the {parent} '{X}'?",
        "Give the {word} {col} over all {tables} that belong to the {parent} '{X}'.",
    )
    return Draft(texts, f"SELECT {function}({{{pen.table.name}.{pen.recipe.column}}}) {source}", parts, unique)


def _facts(pen: Pen) -> Draft | None:
    parent, join = _link(pen)
    named = pen.named(pen.table)
    if named is None or pen.table.label is None:
        return None
    name, one = named
    parts = _words(pen, parent=pen.word(parent.words), col=pen.column(pen.recipe.column, parent), X=name)
    where = f"{{{pen.table.name}.{pen.table.label.name}}} = {literal(name)}"
    texts = ("What is the {col} of the {parent} of the {table} '{X}'?",)
    return Draft(texts, f"SELECT {{{parent.name}.{pen.recipe.column}}} FROM {join} WHERE {where}", parts, (one,))


def _far(pen: Pen) -> Draft | None:
    parent, join = _link(pen)
    far = pen.database.tables[pen.recipe.other]
    named = pen.named(far)
    if named is None or far.key is None or far.label is None:
        return None
    name, one = named
    join += f" JOIN {{{far.name}}} ON {{{parent.name}.{pen.recipe.column}}} = {{{far.name}.{far.key.name}}}"
    parts = _words(pen, parent=pen.word(parent.words), far=pen.word(far.words), X=name)
    texts = ("Through their {parent}, how many {tables} belong to the {far} '{X}'?",)
    where = f"{{{far.name}.{far.label.name}}} = {literal(name)}"
    return Draft(texts, f"SELECT COUNT(*) FROM {join} WHERE {where}", parts, (one,))


def _over(pen: Pen) -> tuple[Any, str] | None:
    bound = pen.bound(pen.table, pen.recipe.column)
    if bound is None:
        return None
    return bound, f"{{{pen.table.name}.{pen.recipe.column}}} > {literal(bound)}"


def _common(pen: Pen) -> Draft | None:
    over = _over(pen)
    if over is None:
        return None
    t, cat = pen.table.name, pen.recipe.other
    parts = _words(pen, cat=pen.column(cat), col=pen.column(pen.recipe.column), N=literal(over[0]))
    group = f"FROM {{{t}}} WHERE {over[1]} GROUP BY {{{t}.{cat}}}"
    texts = ("Which {cat} is the most common among the {tables} with {col} over {N}?",)
    sql = f"SELECT {{{t}.{cat}}} {group} ORDER BY COUNT(*) DESC LIMIT 1"
    return Draft(texts, sql, parts, (alone("COUNT(*)", group),))


def _most(pen: Pen) -> Draft | None:
    over = _over(pen)
    parent, join = _link(pen)
    if over is None or parent.key is None or parent.label is None:
        return None
    parts = _words(pen, parent=pen.word(parent.words), col=pen.column(pen.recipe.column), N=literal(over[0]))
    parts["label"] = pen.word(parent.label.words)
    group = f"FROM {join} WHERE {over[1]} GROUP BY {{{parent.name}.{parent.key.name}}}"
    texts = ("Which {parent} has the most {tables} with {col} over {N}? Give its {label}.",)
    sql = f"SELECT {{{parent.name}.{parent.label.name}}} {group} ORDER BY COUNT(*) DESC LIMIT 1"
    return Draft(texts, sql, parts, (alone("COUNT(*)", group),))


def _best(pen: Pen) -> Draft | None:
    t, cat, column, label = pen.table.name, pen.recipe.other, pen.recipe.column, pen.table.label
    value = pen.value(pen.table, cat)
    if value is None or label is None:
        return None
    k = pen.rng.choice((2, 3))
    parts = _words(pen, cat=pen.column(cat), col=pen.column(column), label=pen.word(label.words), V=str(value))
    parts["k"] = {2: "two", 3: "three"}[k]
    source = f"FROM {{{t}}} WHERE {{{t}.{cat}}} = {literal(value)} AND {{{t}.{column}}} IS NOT NULL"
    # Among the first k + 1 no two figures may be equal, else the order is not determined.
    head = f"SELECT {{{t}.{column}}} AS v {source} ORDER BY {{{t}.{column}}} DESC LIMIT {k + 1}"
    alone = f"SELECT COUNT(*) = COUNT(DISTINCT v) FROM ({head})"
    texts = ("Give the {label} of the {k} {tables} with the highest {col} whose {cat} is '{V}', highest first.",)
    sql = f"SELECT {{{t}.{label.name}}} {source} ORDER BY {{{t}.{column}}} DESC LIMIT {k}"
    return Draft(texts, sql, parts, (alone,), ordered=True)


def _range(pen: Pen) -> Draft | None:
    t, cat, column = pen.table.name, pen.recipe.other, pen.recipe.column
    value = pen.value(pen.table, cat)
    low, high = pen.bound(pen.table, column), pen.bound(pen.table, column)
    if value is None or low is None or high is None or low == high:
        return None
    low, high = min(low, high), max(low, high)
    parts = _words(pen, cat=pen.column(cat), col=pen.column(column), V=str(value), N=literal(low), M=literal(high))
    texts = ("How many {tables} whose {cat} is '{V}' have {col} from {N} to {M}?",)
    where = f"{{{t}.{cat}}} = {literal(value)} AND {{{t}.{column}}} BETWEEN {literal(low)} AND {literal(high)}"
    return Draft(texts, f"SELECT COUNT(*) FROM {{{t}}} WHERE {where}", parts)


def _set(pen: Pen) -> Draft | None:
    t, cat, column = pen.table.name, pen.recipe.other, pen.recipe.column
    value, new = pen.value(pen.table, cat), pen.bound(pen.table, column)
    if value is None or new is None:
        return None
    parts = _words(pen, cat=pen.column(cat), col=pen.column(column), V=str(value), N=literal(new))
    texts = ("Set the {col} of every {table} whose {cat} is '{V}' to {N}.",)
    sql = f"UPDATE {{{t}}} SET {{:{t}.{column}}} = {literal(new)} WHERE {{:{t}.{cat}}} = {literal(value)}"
    return Draft(texts, sql, parts, writes=True)


def _children_of(pen: Pen) -> tuple[dict[str, str], str, tuple[str, ...]] | None:
    """As `_of_parent`, as a condition for UPDATE and DELETE."""
    parent, _ = _link(pen)
    named = pen.named(parent)
    if named is None or parent.label is None or parent.key is None:
        return None
    name, one = named
    p = parent.name
    keys = f"SELECT {{:{p}.{parent.key.name}}} FROM {{{p}}} WHERE {{:{p}.{parent.label.name}}} = {literal(name)}"
    parts = _words(pen, parent=pen.word(parent.words), X=name)
    return parts, f"{{:{pen.table.name}.{pen.recipe.ref}}} IN ({keys})", (one,)


def _raise(pen: Pen) -> Draft | None:
    found = _children_of(pen)
    if found is None:
        return None
    parts, where, unique = found
    step = pen.rng.randint(1, 20)
    column = f"{{:{pen.table.name}.{pen.recipe.column}}}"
    parts |= {"col": pen.column(pen.recipe.column), "N": str(step)}
    texts = ("Raise the {col} of all {tables} of the {parent} '{X}' by {N}.",)
    sql = f"UPDATE {{{pen.table.name}}} SET {column} = {column} + {step} WHERE {where} AND {column} IS NOT NULL"
    return Draft(texts, sql, parts, unique, writes=True)


def _delete(pen: Pen) -> Draft | None:
    found = _children_of(pen)
    bound = pen.bound(pen.table, pen.recipe.column)
    if found is None or bound is None:
        return None
    parts, where, unique = found
    t = pen.table.name
    parts |= {"col": pen.column(pen.recipe.column), "N": literal(bound)}
    texts = ("Delete the {tables} of the {parent} '{X}' with {col} under {N}.",)
    sql = f"DELETE FROM {{{t}}} WHERE {where} AND {{:{t}.{pen.recipe.column}}} < {literal(bound)}"
    return Draft(texts, sql, parts, unique, writes=True)


def _insert(pen: Pen) -> Draft | None:
    t, key, label, column = pen.table.name, pen.table.key, pen.table.label, pen.recipe.column
    name, value = pen.value(pen.table, label.name) if label else None, pen.value(pen.table, column)
    if name is None or value is None or key is None or label is None:
        return None
    number = pen.rng.randint(90_000, 99_999)
    name = f"New {name}"
    parts = _words(pen, label=pen.word(label.words), key=pen.word(key.words), col=pen.column(column))
    parts |= {"X": name, "N": str(number), "V": str(value)}
    if not may_name(pen.side, name):
        return None
    texts = ("Add a {table} with {key} {N}, {label} '{X}' and {col} '{V}'; leave everything else empty.",)
    columns = ", ".join(f"{{:{t}.{c}}}" for c in (key.name, label.name, column))
    sql = f"INSERT INTO {{{t}}} ({columns}) VALUES ({number}, {literal(name)}, {literal(value)})"
    return Draft(texts, sql, parts, writes=True)


def _above(pen: Pen) -> Draft | None:
    t, column = pen.table.name, f"{{{pen.table.name}.{pen.recipe.column}}}"
    parts = _words(pen, col=pen.column(pen.recipe.column))
    texts = ("How many {tables} have {col} above the average {col} of all {tables}?",)
    return Draft(texts, f"SELECT COUNT(*) FROM {{{t}}} WHERE {column} > (SELECT AVG({column}) FROM {{{t}}})", parts)


def _frequent(pen: Pen) -> Draft | None:
    t, cat, k = pen.table.name, pen.recipe.other, pen.rng.randint(1, 4)
    parts = _words(pen, cat=pen.column(cat), N=str(k))
    texts = ("How many values of {cat} occur for more than {N} {tables}?",)
    group = f"SELECT 1 FROM {{{t}}} WHERE {{{t}.{cat}}} IS NOT NULL GROUP BY {{{t}.{cat}}} HAVING COUNT(*) > {k}"
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", parts)


def _without(pen: Pen) -> Draft | None:
    parent, _ = _link(pen)
    assert parent.key is not None
    t = pen.table.name
    word = pen.word(parent.words)
    parts = _words(pen, parent=word, parents=plural(word))
    texts = ("How many {parents} have no {table} at all?",)
    inner = f"SELECT 1 FROM {{{t}}} WHERE {{{t}.{pen.recipe.ref}}} = {{{parent.name}.{parent.key.name}}}"
    return Draft(texts, f"SELECT COUNT(*) FROM {{{parent.name}}} WHERE NOT EXISTS ({inner})", parts)


def _different(pen: Pen) -> Draft | None:
    over = _over(pen)
    if over is None:
        return None
    t, cat = pen.table.name, pen.recipe.other
    parts = _words(pen, cat=pen.column(cat), col=pen.column(pen.recipe.column), N=literal(over[0]))
    texts = ("How many different values of {cat} do the {tables} with {col} over {N} have?",)
    return Draft(texts, f"SELECT COUNT(DISTINCT {{{t}.{cat}}}) FROM {{{t}}} WHERE {over[1]}", parts)


_KINDS = {
    "count": _count, "list": _list, "aggregate": _aggregate, "facts": _facts, "far": _far, "common": _common,
    "most": _most, "best": _best, "range": _range, "set": _set, "raise": _raise, "insert": _insert, "delete": _delete,
    "above": _above, "frequent": _frequent, "without": _without, "different": _different,
}  # fmt: skip
