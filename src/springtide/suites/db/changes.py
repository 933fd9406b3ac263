"""Questions of the levels `hard` and `expert` that change the database: what counts is the state they leave.

Owns: the kinds that write. Invariants as in `standard`; a row is found by what it belongs to or how it compares, never
by its key alone.
Called by: `deep`.
"""

from __future__ import annotations

from collections.abc import Callable

from springtide.suites.db.catalog import may_name
from springtide.suites.db.pen import DeepPen, Draft, NothingToName, bare
from springtide.suites.db.question import literal


def _keys(pen: DeepPen, where: str) -> str:
    """The keys of the parents for which `where` holds."""
    return f"SELECT {pen.key_p} FROM {pen.p} WHERE {where}"


def _theirs(pen: DeepPen, where: str) -> str:
    """The condition that a row belongs to a parent for which `where` holds."""
    return f"{bare(pen.ref)} IN ({_keys(pen, where)})"


def _of_far(pen: DeepPen, where: str) -> str:
    """The condition that a row belongs, through its parent, to a far row for which `where` holds."""
    far = f"SELECT {pen.key_f} FROM {pen.f} WHERE {where}"
    return _theirs(pen, f"{pen.of(pen.parent, pen.recipe.up)} IN ({far})")


def _set_below(pen: DeepPen) -> Draft:
    value, bound = pen.shared(), pen.over()
    texts = (
        "Set the {col} to {N} for every {table} whose {cat} is '{V}' and whose {col} is below the average {col} of all"
        " {tables}.",
    )
    mean = f"SELECT AVG({pen.c}) FROM {pen.t}"
    where = f"{bare(pen.cat)} = {literal(value)} AND {bare(pen.c)} < ({mean})"
    sql = f"UPDATE {pen.t} SET {bare(pen.c)} = {literal(bound)} WHERE {where}"
    return Draft(texts, sql, pen.parts(V=value, N=bound), writes=True)


def _raise_under(pen: DeepPen) -> Draft:
    one, bound, step = pen.one_of(pen.parent), pen.over(), pen.rng.randint(1, 20)
    texts = ("Raise the {col} by {N} for those {tables} of the {parent} '{X}' whose {col} is under {M}.",)
    where = f"{_theirs(pen, one.where)} AND {bare(pen.c)} < {literal(bound)}"
    sql = f"UPDATE {pen.t} SET {bare(pen.c)} = {bare(pen.c)} + {step} WHERE {where}"
    return Draft(texts, sql, pen.parts(X=one.name, N=step, M=bound), (one.single,), writes=True)


def _delete_other(pen: DeepPen) -> Draft:
    one, value = pen.one_of(pen.parent), pen.shared()
    texts = ("Delete the {tables} of the {parent} '{X}' whose {cat} is anything but '{V}'.",)
    sql = f"DELETE FROM {pen.t} WHERE {_theirs(pen, one.where)} AND {bare(pen.cat)} <> {literal(value)}"
    # Whether an unknown word is another word is nothing to be asked in passing.
    known = f"SELECT COUNT(*) = 0 FROM {pen.link} WHERE {one.where} AND {pen.cat} IS NULL"
    return Draft(texts, sql, pen.parts(X=one.name, V=value), (one.single, known), writes=True)


def _new_name(pen: DeepPen) -> str:
    assert pen.table.label is not None
    name = f"New {pen.value_of(pen.table.label.name)}"
    if not may_name(pen.side, name):
        raise NothingToName
    return name


def _insert_child(pen: DeepPen) -> Draft:
    one, name, number = pen.one_of(pen.parent), _new_name(pen), pen.rng.randint(90_000, 99_999)
    assert pen.table.key is not None
    texts = (
        "Add one {table} with {key} {N} and {label} '{Y}' that belongs to the {parent} '{X}'; leave everything else"
        " empty.",
    )
    columns = ", ".join(map(bare, (pen.key, pen.label, pen.ref)))
    sql = (
        f"INSERT INTO {pen.t} ({columns}) SELECT {number}, {literal(name)}, {pen.key_p} FROM {pen.p} WHERE {one.where}"
    )
    parts = pen.parts(X=one.name, Y=name, N=number) | {"key": pen.column(pen.table.key.name)}
    return Draft(texts, sql, parts, (one.single,), writes=True)


def _move(pen: DeepPen) -> Draft:
    two = pen.two_of(pen.parent)
    texts = ("Let every {table} of the {parent} '{X}' belong to the {parent} '{Y}' instead.",)
    sql = f"UPDATE {pen.t} SET {bare(pen.ref)} = ({_keys(pen, two[1].where)}) WHERE {_theirs(pen, two[0].where)}"
    return Draft(texts, sql, pen.parts(X=two[0].name, Y=two[1].name), (two[0].single, two[1].single), writes=True)


def _level_up(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    word, function = pen.rng.choice((("highest", "MAX"), ("lowest", "MIN")))
    texts = ("Set the {col} of every {table} of the {parent} '{X}' to the {word} {col} among them.",)
    best = f"SELECT {function}({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"UPDATE {pen.t} SET {bare(pen.c)} = ({best}) WHERE {_theirs(pen, one.where)}"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single,), writes=True)


def _rename(pen: DeepPen) -> Draft:
    two, bound = pen.two_shared(), pen.over()
    texts = ("Change the {cat} from '{V}' to '{W}' for all {tables} with {col} over {N}.",)
    where = f"{bare(pen.cat)} = {literal(two[0])} AND {bare(pen.c)} > {literal(bound)}"
    sql = f"UPDATE {pen.t} SET {bare(pen.cat)} = {literal(two[1])} WHERE {where}"
    return Draft(texts, sql, pen.parts(V=two[0], W=two[1], N=bound), writes=True)


def _delete_rare(pen: DeepPen) -> Draft:
    least = pen.rng.choice((2, 2, 3, 5, 10))
    texts = ("Delete the {tables} whose {cat} fewer than {K} {tables} have; keep those without a {cat}.",)
    rare = f"SELECT {pen.cat} FROM {pen.t} GROUP BY {pen.cat} HAVING COUNT(*) < {least}"
    sql = f"DELETE FROM {pen.t} WHERE {bare(pen.cat)} IN ({rare})"
    return Draft(texts, sql, pen.parts(K=least), writes=True)


def _swap(pen: DeepPen) -> Draft:
    two, bound = pen.two_shared(), pen.over()
    texts = ("Among the {tables} with {col} under {N}, swap the {cat} '{V}' and '{W}': each becomes the other.",)
    one, other = map(literal, two)
    cat = bare(pen.cat)
    sql = (
        f"UPDATE {pen.t} SET {cat} = CASE {cat} WHEN {one} THEN {other} ELSE {one} END"
        f" WHERE {cat} IN ({one}, {other}) AND {bare(pen.c)} < {literal(bound)}"
    )
    return Draft(texts, sql, pen.parts(V=two[0], W=two[1], N=bound), writes=True)


# --- of `expert` ------------------------------------------------------------------------------------------------------


def _delete_lowest(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    word, function = pen.rng.choice((("highest", "MAX"), ("lowest", "MIN")))
    texts = ("Of the {tables} of the {parent} '{X}', delete those that have the {word} {col} among them.",)
    worst = f"SELECT {function}({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"DELETE FROM {pen.t} WHERE {_theirs(pen, one.where)} AND {bare(pen.c)} = ({worst})"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single,), writes=True)


def _delete_far(pen: DeepPen) -> Draft:
    one, bound = pen.one_of(pen.far), pen.over()
    texts = ("Delete the {tables} with {col} under {N} that belong, through their {parent}, to the {far} '{X}'.",)
    sql = f"DELETE FROM {pen.t} WHERE {_of_far(pen, one.where)} AND {bare(pen.c)} < {literal(bound)}"
    return Draft(texts, sql, pen.parts(X=one.name, N=bound), (one.single,), writes=True)


def _scale_far(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    word, factor = pen.rng.choice((("Double", 2), ("Triple", 3)))
    texts = (
        "{word} the {col} of the {tables} that belong, through their {parent}, to the {far} '{X}' and have {col} above"
        " the average {col} of all {tables}.",
    )
    mean = f"SELECT AVG({pen.c}) FROM {pen.t}"
    where = f"{_of_far(pen, one.where)} AND {bare(pen.c)} > ({mean})"
    sql = f"UPDATE {pen.t} SET {bare(pen.c)} = {bare(pen.c)} * {factor} WHERE {where}"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single,), writes=True)


def _copy_row(pen: DeepPen) -> Draft:
    one, name, number = pen.one_of(pen.table), _new_name(pen), pen.rng.randint(90_000, 99_999)
    assert pen.table.key is not None
    texts = (
        "Add one copy of the {table} '{X}': its {key} is {N} and its {label} '{Y}', everything else is as it is there.",
    )
    rest = [pen.of(pen.table, c.name) for c in pen.table.columns if c.role not in ("id", "label")]
    columns = ", ".join(map(bare, (pen.key, pen.label, *rest)))
    values = ", ".join((str(number), literal(name), *rest))
    sql = f"INSERT INTO {pen.t} ({columns}) SELECT {values} FROM {pen.t} WHERE {one.where}"
    parts = pen.parts(X=one.name, Y=name, N=number) | {"key": pen.column(pen.table.key.name)}
    return Draft(texts, sql, parts, (one.single,), writes=True)


def _branch(pen: DeepPen) -> Draft:
    two, bound = pen.two_shared(), pen.over()
    texts = (
        "For the {tables} whose {cat} is '{V}': where the {col} is at least {N}, the {cat} becomes '{W}'; where it is"
        " less, the {col} becomes 0.",
    )
    cat, c, n = bare(pen.cat), bare(pen.c), literal(bound)
    sql = (
        f"UPDATE {pen.t} SET {cat} = CASE WHEN {c} >= {n} THEN {literal(two[1])} ELSE {cat} END,"
        f" {c} = CASE WHEN {c} < {n} THEN 0 ELSE {c} END WHERE {cat} = {literal(two[0])}"
    )
    return Draft(texts, sql, pen.parts(V=two[0], W=two[1], N=bound), writes=True)


def _delete_beyond(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "Delete every {table} with {col} above the highest {col} of the {tables} of the {parent} '{X}'.",
        "Delete all {tables} whose {col} exceeds that of every {table} of the {parent} '{X}'.",
    )
    best = f"SELECT MAX({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"DELETE FROM {pen.t} WHERE {bare(pen.c)} > ({best})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,), writes=True)


KINDS: dict[str, Callable[[DeepPen], Draft]] = {
    "set_below": _set_below, "raise_under": _raise_under, "delete_other": _delete_other,
    "insert_child": _insert_child, "move": _move, "level_up": _level_up, "rename": _rename,
    "delete_rare": _delete_rare, "swap": _swap, "delete_lowest": _delete_lowest, "delete_far": _delete_far,
    "scale_far": _scale_far, "copy_row": _copy_row, "branch": _branch, "delete_beyond": _delete_beyond,
}  # fmt: skip
