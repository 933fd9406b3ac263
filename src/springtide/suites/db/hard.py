"""Questions of the level `hard`: means to compare with, groups with conditions, days, rows found by other rows.

Owns: the kinds that read; those that change are in `changes`. Invariants as in `standard`.
Called by: `deep`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from springtide.suites.db.pen import DeepPen, Draft, alone, apart
from springtide.suites.db.question import literal


def _above_mean(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "How many {tables} of the {parent} '{X}' have {col} above the average {col} of all {tables}?",
        "Of the {tables} that belong to the {parent} '{X}', how many exceed the average {col} of all {tables}?",
    )
    mean = f"SELECT AVG({pen.c}) FROM {pen.t}"
    sql = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where} AND {pen.c} > ({mean})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _above_own(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("How many {tables} of the {parent} '{X}' have {col} under the average {col} of the {tables} of '{X}'?",)
    mean = f"SELECT AVG({pen.c}) FROM {pen.link} WHERE {one.where}"
    sql = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where} AND {pen.c} < ({mean})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _having(pen: DeepPen) -> Draft:
    bound, least = pen.over(), pen.rng.randint(2, 5)
    texts = (
        "How many {parents} have at least {K} {tables} with {col} over {N}?",
        "Count the {parents} with {K} or more {tables} whose {col} is over {N}.",
    )
    group = f"SELECT 1 FROM {pen.link} WHERE {pen.c} > {literal(bound)} GROUP BY {pen.key_p} HAVING COUNT(*) >= {least}"
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", pen.parts(K=least, N=bound))


def _best_mean(pen: DeepPen) -> Draft:
    least = pen.rng.randint(2, 5)
    way, word = pen.rng.choice((("DESC", "highest"), ("ASC", "lowest")))
    texts = (
        "Which {parent} has the {word} average {col} of its {tables}, among the {parents} with at least {K} {tables}"
        " that have a {col}? Give its {label_p}.",
    )
    group = f"FROM {pen.link} WHERE {pen.c} IS NOT NULL GROUP BY {pen.key_p} HAVING COUNT(*) >= {least}"
    sql = f"SELECT {pen.label_p} {group} ORDER BY AVG({pen.c}) {way} LIMIT 1"
    metric = f"AVG({pen.c})" if way == "DESC" else f"-AVG({pen.c})"
    return Draft(texts, sql, pen.parts(K=least, word=word), (alone(metric, group),))


def _share_over(pen: DeepPen) -> Draft:
    value, bound = pen.shared(), pen.over()
    texts = ("What percentage of all {tables} whose {cat} is '{V}' have {col} over {N}? Round to two decimals.",)
    sql = (
        f"SELECT ROUND(100.0 * SUM(CASE WHEN {pen.c} > {literal(bound)} THEN 1 ELSE 0 END) / COUNT(*), 2)"
        f" FROM {pen.t} WHERE {pen.cat} = {literal(value)}"
    )
    return Draft(texts, sql, pen.parts(V=value, N=bound))


def _mean_gap(pen: DeepPen) -> Draft:
    two = pen.two_shared()
    texts = (
        "What is the average {col} of the {tables} whose {cat} is '{V}' less the average {col} of those whose {cat} is"
        " '{W}'?",
    )
    means = [f"(SELECT AVG({pen.c}) FROM {pen.t} WHERE {pen.cat} = {literal(value)})" for value in two]
    return Draft(texts, f"SELECT {means[0]} - {means[1]}", pen.parts(V=two[0], W=two[1]))


def _second(pen: DeepPen) -> Draft:
    value = pen.shared()
    texts = ("Which {table} has the second highest {col} of those whose {cat} is '{V}'? Give its {label}.",)
    source = f"FROM {pen.t} WHERE {pen.cat} = {literal(value)} AND {pen.c} IS NOT NULL"
    sql = f"SELECT {pen.label} {source} ORDER BY {pen.c} DESC LIMIT 1 OFFSET 1"
    return Draft(texts, sql, pen.parts(V=value), (apart(pen.c, source, 3),))


def _between_days(pen: DeepPen) -> Draft:
    one, (first, last) = pen.one_of(pen.parent), pen.two_values(pen.recipe.day)
    texts = ("How many {tables} of the {parent} '{X}' have their {date} from {D} to {E}, both days included?",)
    where = f"{one.where} AND {pen.day} BETWEEN '{first}' AND '{last}'"
    parts = pen.parts(X=one.name, D=first, E=last)
    return Draft(texts, f"SELECT COUNT(*) FROM {pen.link} WHERE {where}", parts, (one.single,))


def _busiest_year(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    unit, form = pen.rng.choice((("year (YYYY)", "%Y"), ("month (YYYY-MM)", "%Y-%m")))
    texts = ("In which {unit}, by {date}, did the {parent} '{X}' have the most {tables}? Give it as text.",)
    when = f"strftime('{form}', {pen.day})"
    group = f"FROM {pen.link} WHERE {one.where} AND {pen.day} IS NOT NULL GROUP BY {when}"
    sql = f"SELECT {when} {group} ORDER BY COUNT(*) DESC LIMIT 1"
    return Draft(texts, sql, pen.parts(X=one.name, unit=unit), (one.single, alone("COUNT(*)", group)))


def _in_month(pen: DeepPen) -> Draft:
    value, day = pen.shared(), pen.value_of(pen.recipe.day)
    month = datetime.date.fromisoformat(day).strftime("%B")
    texts = ("How many {tables} whose {cat} is '{V}' have their {date} in {M}, of whatever year?",)
    where = f"{pen.cat} = {literal(value)} AND strftime('%m', {pen.day}) = '{day[5:7]}'"
    return Draft(texts, f"SELECT COUNT(*) FROM {pen.t} WHERE {where}", pen.parts(V=value, M=month))


def _latest(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    way, word = pen.rng.choice((("DESC", "latest"), ("ASC", "earliest")))
    texts = ("What is the {col} of the {word} {table}, by {date}, of the {parent} '{X}'?",)
    source = f"FROM {pen.link} WHERE {one.where} AND {pen.day} IS NOT NULL"
    sql = f"SELECT {pen.c} {source} ORDER BY {pen.day} {way} LIMIT 1"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single, apart(pen.day, source, 2, way)))


def _far_total(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    word, function = pen.rng.choice((("total", "SUM"), ("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN")))
    texts = (
        "What is the {word} {col} of the {tables} that belong, through their {parent}, to the {far} '{X}'?",
        "Give the {word} {col} over the {tables} of all {parents} of the {far} '{X}'.",
    )
    return Draft(
        texts,
        f"SELECT {function}({pen.c}) FROM {pen.link} WHERE {one.where}",
        pen.parts(X=one.name, word=word),
        (one.single,),
    )


def _far_reach(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.far)
    texts = ("How many different {parents} of the {far} '{X}' have at least one {table}?",)
    return Draft(
        texts,
        f"SELECT COUNT(DISTINCT {pen.key_p}) FROM {pen.link} WHERE {one.where}",
        pen.parts(X=one.name),
        (one.single,),
    )


def _like_named(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.table)
    texts = ("How many other {tables} have the same {cat} as the {table} '{X}'?",)
    same = f"SELECT {pen.cat} FROM {pen.t} WHERE {one.where}"
    sql = f"SELECT COUNT(*) - 1 FROM {pen.t} WHERE {pen.cat} = ({same})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, f"{one.single} AND {pen.cat} IS NOT NULL"))


def _beyond_named(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.table)
    sign, word = pen.rng.choice(((">", "higher"), ("<", "lower")))
    texts = ("How many {tables} have a {word} {col} than the {table} '{X}'?",)
    bound = f"SELECT {pen.c} FROM {pen.t} WHERE {one.where}"
    sql = f"SELECT COUNT(*) FROM {pen.t} WHERE {pen.c} {sign} ({bound})"
    return Draft(texts, sql, pen.parts(X=one.name, word=word), (one.single, f"{one.single} AND {pen.c} IS NOT NULL"))


def _groups_over(pen: DeepPen) -> Draft:
    least = pen.rng.choice((2, 3, 4, 5, 10, 20, 40, 80, 150, 300))
    texts = (
        "List each {cat} that at least {K} {tables} have, and how many have it: the commonest first, equally common"
        " ones in alphabetical order.",
    )
    sql = (
        f"SELECT {pen.cat}, COUNT(*) FROM {pen.t} WHERE {pen.cat} IS NOT NULL GROUP BY {pen.cat}"
        f" HAVING COUNT(*) >= {least} ORDER BY COUNT(*) DESC, {pen.cat}"
    )
    return Draft(texts, sql, pen.parts(K=least), ordered=True)


def _childless(pen: DeepPen) -> Draft:
    bound = pen.over()
    texts = (
        "List the {label_p} of every {parent} that has {tables} but none with {col} over {N}, in alphabetical order.",
    )
    some = f"SELECT {pen.ref} FROM {pen.t}"
    above = f"SELECT {pen.ref} FROM {pen.t} WHERE {pen.c} > {literal(bound)} AND {pen.ref} IS NOT NULL"
    sql = (
        f"SELECT {pen.label_p} FROM {pen.p} WHERE {pen.key_p} IN ({some}) AND {pen.key_p} NOT IN ({above})"
        f" ORDER BY {pen.label_p}"
    )
    return Draft(texts, sql, pen.parts(N=bound), ordered=True)


def _family(pen: DeepPen, function: str, *texts: str) -> Draft:
    bound = pen.over()
    group = f"SELECT COUNT(*) AS n FROM {pen.link} WHERE {pen.c} > {literal(bound)} GROUP BY {pen.key_p}"
    return Draft(texts, f"SELECT {function}(n) FROM ({group})", pen.parts(N=bound))


def _largest_family(pen: DeepPen) -> Draft:
    return _family(pen, "MAX", "What is the largest number of {tables} with {col} over {N} that any one {parent} has?")


def _mean_family(pen: DeepPen) -> Draft:
    text = "Among the {parents} that have any {tables} with {col} over {N}, how many such {tables} has one on average?"
    return _family(pen, "AVG", text)


def _both_cats(pen: DeepPen) -> Draft:
    two = pen.two_shared()
    texts = ("How many {parents} have both {tables} whose {cat} is '{V}' and {tables} whose {cat} is '{W}'?",)
    found = [f"SELECT {pen.key_p} FROM {pen.link} WHERE {pen.cat} = {literal(value)}" for value in two]
    return Draft(texts, f"SELECT COUNT(*) FROM ({found[0]} INTERSECT {found[1]})", pen.parts(V=two[0], W=two[1]))


def _unknown(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("For how many {tables} of the {parent} '{X}' is no {col} recorded?",)
    sql = f"SELECT COUNT(*) FROM {pen.link} WHERE {one.where} AND {pen.c} IS NULL"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _three_facts(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = (
        "Give, in one row, the number of {tables} of the {parent} '{X}', their lowest {col} and their highest {col}.",
    )
    sql = f"SELECT COUNT(*), MIN({pen.c}), MAX({pen.c}) FROM {pen.link} WHERE {one.where}"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


def _top_groups(pen: DeepPen) -> Draft:
    bound = pen.over()
    texts = (
        "Counting only {tables} with {col} under {N}, which three {parents} have the highest total {col} of their"
        " {tables}? Give their {label_p}, the highest first.",
    )
    group = f"FROM {pen.link} WHERE {pen.c} < {literal(bound)} GROUP BY {pen.key_p}"
    sql = f"SELECT {pen.label_p} {group} ORDER BY SUM({pen.c}) DESC LIMIT 3"
    return Draft(texts, sql, pen.parts(N=bound), (apart(f"SUM({pen.c})", group, 4),), ordered=True)


def _spread(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.parent)
    texts = ("What is the difference between the highest and the lowest {col} of the {tables} of the {parent} '{X}'?",)
    sql = f"SELECT MAX({pen.c}) - MIN({pen.c}) FROM {pen.link} WHERE {one.where}"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single,))


# --- asked on `ood` alone ---------------------------------------------------------------------------------------------


def _exactly(pen: DeepPen) -> Draft:
    count = pen.rng.randint(1, 6)
    texts = ("How many {parents} have exactly {K} {tables}?",)
    group = f"SELECT 1 FROM {pen.link} GROUP BY {pen.key_p} HAVING COUNT(*) = {count}"
    return Draft(texts, f"SELECT COUNT(*) FROM ({group})", pen.parts(K=count))


def _without_cat(pen: DeepPen) -> Draft:
    value = pen.shared()
    texts = ("How many {parents} have {tables}, but none whose {cat} is '{V}'?",)
    these = f"SELECT {pen.key_p} FROM {pen.link}"
    sql = f"SELECT COUNT(*) FROM ({these} EXCEPT {these} WHERE {pen.cat} = {literal(value)})"
    return Draft(texts, sql, pen.parts(V=value))


def _nth_lowest(pen: DeepPen) -> Draft:
    place, word = pen.rng.choice(((2, "second"), (3, "third"), (4, "fourth")))
    texts = (
        "Counting equal ones once, what is the {word} lowest {col} of the {tables}, and how many {tables} have it?",
    )
    group = f"FROM {pen.t} WHERE {pen.c} IS NOT NULL GROUP BY {pen.c}"
    sql = f"SELECT {pen.c}, COUNT(*) {group} ORDER BY {pen.c} LIMIT 1 OFFSET {place - 1}"
    return Draft(texts, sql, pen.parts(word=word))


def _same_parent(pen: DeepPen) -> Draft:
    one = pen.one_of(pen.table)
    texts = ("How many other {tables} belong to the same {parent} as the {table} '{X}'?",)
    sql = f"SELECT COUNT(*) - 1 FROM {pen.t} WHERE {pen.ref} = (SELECT {pen.ref} FROM {pen.t} WHERE {one.where})"
    return Draft(texts, sql, pen.parts(X=one.name), (one.single, f"{one.single} AND {pen.ref} IS NOT NULL"))


KINDS: dict[str, Callable[[DeepPen], Draft]] = {
    "above_mean": _above_mean, "above_own": _above_own, "having": _having, "best_mean": _best_mean,
    "share_over": _share_over, "mean_gap": _mean_gap, "second": _second, "between_days": _between_days,
    "busiest_year": _busiest_year, "in_month": _in_month, "latest": _latest, "far_total": _far_total,
    "far_reach": _far_reach, "like_named": _like_named, "beyond_named": _beyond_named, "groups_over": _groups_over,
    "childless": _childless, "largest_family": _largest_family, "mean_family": _mean_family, "both_cats": _both_cats,
    "unknown": _unknown, "three_facts": _three_facts, "top_groups": _top_groups, "spread": _spread,
    "exactly": _exactly, "without_cat": _without_cat, "nth_lowest": _nth_lowest, "same_parent": _same_parent,
}  # fmt: skip
