"""Questions of the level `expert`: three tables, groups against groups, running sums, places, shares, quantifiers.

Owns: the kinds that read; those that change are in `changes`. Invariants as in `standard`.
Called by: `deep`.
"""

from __future__ import annotations

from collections.abc import Callable

from springtide.suites.db.pen import DeepPen, Draft, NothingToName, alone
from springtide.suites.db.question import literal

_WEEK = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def _above_parents(pen: DeepPen) -> Draft:
    bound = pen.over()
    texts = (
        "How many {tables} have {col} under {N} and yet above the average {col} of all {tables} of their own {parent}?",
    )
    means = f"SELECT {pen.ref} AS r, AVG({pen.c}) AS mean FROM {pen.t} GROUP BY {pen.ref}"
    sql = (
        f"SELECT COUNT(*) FROM {pen.t} JOIN ({means}) AS m ON m.r = {pen.ref}"
        f" WHERE {pen.c} < {literal(bound)} AND {pen.c} > m.mean"
    )
    return Draft(texts, sql, pen.parts(N=bound))


def _per_parent(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    word, function = pen.rng.choice((("total", "SUM"), ("highest", "MAX"), ("average", "AVG")))
    texts = (
        "For every {parent} of the {far} '{X}' that has {tables}, give its {label_p} and the {word} {col} of its"
        " {tables}, in alphabetical order of the {label_p}.",
    )
    source = f"FROM {pen.link} WHERE {one.where} AND {pen.c} IS NOT NULL"
    sql = f"SELECT {pen.label_p}, {function}({pen.c}) {source} GROUP BY {pen.key_p} ORDER BY {pen.label_p}"
    names = f"SELECT COUNT(DISTINCT {pen.key_p}) = COUNT(DISTINCT {pen.label_p}) {source}"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single, names), ordered=True)


def _first_pass(pen: DeepPen) -> Draft:
    one, bound = pen.one_of(pen.parent), pen.over()
    if bound <= 0:
        raise NothingToName
    bound = round(bound * pen.rng.choice((2, 3, 5, 10)), 2)
    texts = (
        "Add up the {col} of the {tables} of the {parent} '{X}' in order of {date}, day by day: on which {date} is the"
        " sum over {N} for the first time?",
    )
    run = f"SELECT {pen.day} AS d, SUM({pen.c}) OVER (ORDER BY {pen.day}) AS s FROM {pen.link} WHERE {one.where}"
    sql = f"SELECT MIN(d) FROM ({run}) WHERE s > {literal(bound)}"
    return Draft(texts, sql, pen.parts(X=one.name, N=bound), (one.single,))


def _days_between(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("How many days lie between the earliest and the latest {date} of the {tables} of the {parent} '{X}'?",)
    days = f"julianday(MAX({pen.day})) - julianday(MIN({pen.day}))"
    sql = f"SELECT CAST({days} AS INTEGER) FROM {pen.link} WHERE {one.where}"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _year_change(pen: DeepPen) -> Draft:
    first, last = pen.two_values("year")
    word, function = pen.rng.choice((("total", "SUM"), ("average", "AVG")))
    texts = ("By how much did the {word} {col} of the {tables} change from the {year} {A} to the {year} {B}?",)
    year = pen.of(pen.table, "year")
    both = [f"(SELECT {function}({pen.c}) FROM {pen.t} WHERE {year} = {literal(y)})" for y in (last, first)]
    parts = pen.parts(A=first, B=last, word=word) | {"year": pen.column("year")}
    return Draft(texts, f"SELECT {both[0]} - {both[1]}", parts)


def _best_month(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "In which month (YYYY-MM, by {date}) was the total {col} of the {tables} of the {parent} '{X}' the highest,"
        " and what was it? Give both in one row.",
    )
    when = f"strftime('%Y-%m', {pen.day})"
    group = f"FROM {pen.link} WHERE {one.where} AND {pen.day} IS NOT NULL GROUP BY {when}"
    sql = f"SELECT {when}, SUM({pen.c}) {group} ORDER BY SUM({pen.c}) DESC LIMIT 1"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, alone(f"SUM({pen.c})", group)))


def _weekday(pen: DeepPen) -> Draft:
    one, day = pen.one_of(pen.parent), pen.rng.randrange(7)
    texts = ("How many {tables} of the {parent} '{X}' have a {D} as their {date}?",)
    sql = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where} AND strftime('%w', {pen.day}) = '{day}'"
    return Draft(texts, sql, pen.parts(X=one.name, D=_WEEK[day]), (one.single,))


def _more_than(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("How many {parents} have more {tables} than the {parent} '{X}'?",)
    own = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where}"
    group = f"SELECT 1 FROM {pen.link} GROUP BY {pen.key_p} HAVING COUNT(*) > ({own})"
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", pen.parts(X=one.name), (one.single,))


def _share_of_all(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "What percentage of the total {col} of all {tables} do the {tables} of the {parent} '{X}' have? Round to two"
        " decimals.",
    )
    own = f"SELECT SUM({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"SELECT ROUND(100.0 * ({own}) / SUM({pen.c}), 2) FROM {pen.t}"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _far_most(pen: DeepPen) -> Draft:
    bound = pen.over()
    texts = (
        "To which {far} do, through their {parent}, the most {tables} with {col} over {N} belong? Give its {label_f}.",
    )
    group = f"FROM {pen.link} WHERE {pen.c} > {literal(bound)} GROUP BY {pen.key_f}"
    sql = f"SELECT {pen.label_f} {group} ORDER BY COUNT(*) DESC LIMIT 1"
    return Draft(texts, sql, pen.parts(N=bound), (alone("COUNT(*)", group),))


def _having_two(pen: DeepPen) -> Draft:
    bound, least = pen.over(), pen.rng.randint(2, 8)
    texts = ("How many {parents} have at least {K} {tables} and an average {col} of these over {N}?",)
    group = (
        f"SELECT 1 FROM {pen.link} GROUP BY {pen.key_p} HAVING COUNT(*) >= {least} AND AVG({pen.c}) > {literal(bound)}"
    )
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", pen.parts(K=least, N=bound))


def _more_total(pen: DeepPen) -> Draft:
    two = pen.two_of(pen.parent)
    word, function = pen.rng.choice((("total", "SUM"), ("average", "AVG"), ("highest", "MAX")))
    texts = (
        "What is the {word} {col} of the {tables} of the {parent} '{X}' less the {word} {col} of those of the {parent}"
        " '{Y}'?",
    )
    both = [f"(SELECT {function}({pen.c}) FROM {pen.link} WHERE {one.where})" for one in two]
    parts = pen.parts(X=two[0].name, Y=two[1].name, word=word)
    return Draft(texts, f"SELECT {both[0]} - {both[1]}", parts, (two[0].single, two[1].single))


def _beyond_all(pen: DeepPen) -> Draft:
    value = pen.shared()
    sign, function, word = pen.rng.choice(((">", "MAX", "higher"), ("<", "MIN", "lower")))
    texts = ("How many {tables} have a {word} {col} than every {table} whose {cat} is '{V}'?",)
    bound = f"SELECT {function}({pen.c}) FROM {pen.t} WHERE {pen.cat} = {literal(value)}"
    sql = f"SELECT COUNT(*) FROM {pen.t} WHERE {pen.c} {sign} ({bound})"
    return Draft(texts, sql, pen.parts(V=value, word=word))


def _mean_of_means(pen: DeepPen) -> Draft:
    least = pen.rng.randint(2, 5)
    texts = (
        "Take, for every {parent} with at least {K} {tables} that have a {col}, the average {col} of these: how many"
        " of the averages are above the average of the averages?",
    )
    means = (
        f"SELECT AVG({pen.c}) AS m FROM {pen.link} WHERE {pen.c} IS NOT NULL"
        f" GROUP BY {pen.key_p} HAVING COUNT(*) >= {least}"
    )
    sql = f"WITH means AS ({means}) SELECT COUNT(*) FROM means WHERE m > (SELECT AVG(m) FROM means)"
    return Draft(texts, sql, pen.parts(K=least))


def _place_of(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "Order the {parents} that have {tables} by the total {col} of these, the highest first: at which place (1 is"
        " the first) is the {parent} '{X}'?",
    )
    sums = f"SELECT SUM({pen.c}) AS s FROM {pen.link} GROUP BY {pen.key_p}"
    own = f"SELECT SUM({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"SELECT COUNT(*) + 1 FROM ({sums}) WHERE s > ({own})"
    single = f"SELECT COUNT(*) FROM ({sums}) WHERE s = ({own})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, single))


def _far_common(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    texts = (
        "Which {cat} is the most common among the {tables} that belong, through their {parent}, to the {far} '{X}'?",
    )
    group = f"FROM {pen.link} WHERE {one.where} AND {pen.cat} IS NOT NULL GROUP BY {pen.cat}"
    sql = f"SELECT {pen.cat} {group} ORDER BY COUNT(*) DESC LIMIT 1"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, alone("COUNT(*)", group)))


def _far_least(pen: DeepPen) -> Draft:
    least = pen.rng.choice((2, 3, 5, 10, 20, 40, 80))
    texts = ("To how many {fars} do, through their {parent}, at least {K} {tables} belong?",)
    group = f"SELECT 1 FROM {pen.link} GROUP BY {pen.key_f} HAVING COUNT(*) >= {least}"
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", pen.parts(K=least))


def _far_above(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    texts = (
        "Of the {tables} that belong, through their {parent}, to the {far} '{X}', how many have {col} above the average"
        " {col} of exactly these {tables}?",
    )
    mean = f"SELECT AVG({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where} AND {pen.c} > ({mean})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


# --- asked on `ood` alone ---------------------------------------------------------------------------------------------


def _median(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "What is the median {col} of the {tables} of the {parent} '{X}' that have one (of an even number of them the"
        " mean of the middle two)?",
    )
    source = f"FROM {pen.link} WHERE {one.where} AND {pen.c} IS NOT NULL"
    count = f"(SELECT COUNT(*) {source})"
    middle = f"SELECT {pen.c} AS v {source} ORDER BY v LIMIT 2 - {count} % 2 OFFSET ({count} - 1) / 2"
    return Draft(texts, f"SELECT AVG(v) FROM ({middle})", pen.parts(X=one.name), (one.single,))


def _every(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("How many other {parents} have {tables} of every {cat} that the {tables} of the {parent} '{X}' have?",)
    want = f"SELECT DISTINCT {pen.cat} AS w FROM {pen.link} WHERE {one.where} AND {pen.cat} IS NOT NULL"
    sql = (
        f"WITH want AS ({want}), have AS (SELECT {pen.key_p} AS k FROM {pen.link} WHERE {pen.cat} IN (SELECT w FROM"
        f" want) GROUP BY {pen.key_p} HAVING COUNT(DISTINCT {pen.cat}) = (SELECT COUNT(*) FROM want))"
        f" SELECT COUNT(*) - 1 FROM have"
    )
    some = f"SELECT COUNT(*) > 0 FROM ({want})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, some))


def _leaders(pen: DeepPen) -> Draft:
    least = pen.rng.randint(2, 5)
    texts = (
        "How many {tables} have the highest {col} of all {tables} with the same {cat}, counting only a {cat} that at"
        " least {K} {tables} have?",
    )
    best = (
        f"SELECT {pen.cat} AS g, MAX({pen.c}) AS m FROM {pen.t} WHERE {pen.cat} IS NOT NULL GROUP BY {pen.cat}"
        f" HAVING COUNT(*) >= {least}"
    )
    sql = f"SELECT COUNT(*) FROM {pen.t} JOIN ({best}) AS b ON b.g = {pen.cat} AND b.m = {pen.c}"
    return Draft(texts, sql, pen.parts(K=least))


def _rises(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "In order of {date}, how often is the {col} of a {table} of the {parent} '{X}' higher than that of the {table}"
        " of this {parent} just before it?",
    )
    source = f"FROM {pen.link} WHERE {one.where}"
    row = f"SELECT {pen.c} AS v, LAG({pen.c}) OVER (ORDER BY {pen.day}) AS u {source}"
    days = f"SELECT COUNT(*) = COUNT(DISTINCT {pen.day}) {source}"
    return Draft(texts, f"SELECT COUNT(*) FROM ({row}) WHERE v > u", pen.parts(X=one.name), (one.single, days))


KINDS: dict[str, Callable[[DeepPen], Draft]] = {
    "above_parents": _above_parents, "per_parent": _per_parent, "first_pass": _first_pass,
    "days_between": _days_between, "year_change": _year_change, "best_month": _best_month, "weekday": _weekday,
    "more_than": _more_than, "share_of_all": _share_of_all, "far_most": _far_most, "having_two": _having_two,
    "more_total": _more_total, "beyond_all": _beyond_all, "mean_of_means": _mean_of_means, "place_of": _place_of,
    "far_common": _far_common, "far_least": _far_least, "far_above": _far_above, "median": _median, "every": _every,
    "leaders": _leaders, "rises": _rises,
}  # fmt: skip
