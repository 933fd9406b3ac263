"""Recipes: which question can be asked of which tables and columns, from the concepts alone (no rows).

Invariants: the list of a (level, split) is the same in every process; `test` has the recipes of `train`; `ood` has
databases of its own, and kinds that no other split asks.
Called by: `environment` (a task names its recipe), `quick`, `standard`, `pen`.
"""

from __future__ import annotations

import functools
import random
from dataclasses import astuple, dataclass, replace

from springtide.suites.db.catalog import GROUPS, Database, Table, databases

QUICK = {"lookup": 30, "cat": 15, "over": 15, "top": 12, "update": 15, "parent": 13}
STANDARD = {
    "count": 12, "list": 10, "aggregate": 14, "facts": 8, "far": 8, "common": 8, "most": 8, "best": 10, "range": 8,
    "set": 8, "raise": 6, "insert": 7, "delete": 7,
}  # fmt: skip
# A kind of the deeper levels: the shape of concepts it is asked about (`_shapes`) and its weight.
HARD = {
    "above_mean": ("child_number", 10), "above_own": ("child_number", 8), "having": ("child_number", 10),
    "best_mean": ("child_number", 10), "share_over": ("number_cat", 8), "mean_gap": ("number_cat", 8),
    "second": ("label_number_cat", 8), "between_days": ("child_date", 9), "busiest_year": ("child_date", 7),
    "in_month": ("date_cat", 6), "latest": ("child_date_number", 8), "far_total": ("far_number", 10),
    "far_reach": ("far", 6), "like_named": ("label_cat", 7), "beyond_named": ("label_number", 7),
    "groups_over": ("cat", 7), "childless": ("child_number", 8), "largest_family": ("child_number", 8),
    "mean_family": ("child_number", 8), "both_cats": ("child_cat", 5), "unknown": ("child_number", 5),
    "three_facts": ("child_number", 8), "top_groups": ("child_number", 8), "spread": ("child_number", 6),
    "set_below": ("number_cat", 7), "raise_under": ("child_number", 7), "delete_other": ("child_cat", 7),
    "insert_child": ("child_label", 8), "move": ("child", 7), "level_up": ("child_number", 7),
    "rename": ("number_cat", 7),
}  # fmt: skip
EXPERT = {
    "above_parents": ("child_number", 10), "per_parent": ("far_number", 9), "first_pass": ("child_date_number", 8),
    "days_between": ("child_date", 7), "year_change": ("year_number", 9), "best_month": ("child_date_number", 7),
    "weekday": ("child_date", 7), "more_than": ("child", 7), "share_of_all": ("child_number", 9),
    "far_most": ("far_number", 9), "having_two": ("child_number", 9), "more_total": ("child_number", 8),
    "beyond_all": ("number_cat", 8), "mean_of_means": ("child_number", 8), "place_of": ("child_number", 9),
    "far_common": ("far_cat", 8), "far_least": ("far", 6), "far_above": ("far_number", 9),
    "delete_lowest": ("child_number", 8), "delete_far": ("far_number", 8), "scale_far": ("far_number", 8),
    "copy_row": ("label_key", 8), "branch": ("number_cat", 8),
}  # fmt: skip
HARD_OOD = {
    "exactly": ("child", 9), "without_cat": ("child_cat", 9), "nth_lowest": ("number", 10),
    "same_parent": ("child_label", 9), "delete_rare": ("cat", 8), "swap": ("number_cat", 9),
}  # fmt: skip
EXPERT_OOD = {
    "median": ("child_number", 12), "every": ("child_cat", 10), "leaders": ("number_cat", 10),
    "rises": ("child_date_number", 10), "delete_beyond": ("child_number", 9),
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
    # Of `hard` and `expert`, where `other` is a word column: a column of days, and the parent's own parent.
    day: str = ""
    up: str = ""
    far: str = ""

    @property
    def id(self) -> str:
        path = ".".join(str(part) for part in astuple(self)[1:] if part)
        return f"{self.kind}:{path}"


def draw_kind(level: str, split: str, rng: random.Random) -> str:
    """A kind of question of this level and split, by weight."""
    kinds = _table(level, split)[0]
    return rng.choices(list(kinds), list(kinds.values()))[0]


def recipes(level: str, split: str) -> dict[str, list[Recipe]]:
    """All recipes by kind."""
    return _table(level, split)[1]


def draw_recipe(level: str, split: str, kind: str, rng: random.Random) -> Recipe:
    """A recipe of this kind. At the deeper levels the database is drawn first: a wide one offers more recipes."""
    found = recipes(level, split)[kind]
    if level not in DEEP:
        return rng.choice(found)
    database = rng.choice(sorted({recipe.database for recipe in found}))
    return rng.choice([recipe for recipe in found if recipe.database == database])


DEEP = {"hard": (HARD, HARD_OOD), "expert": (EXPERT, EXPERT_OOD)}


def groups(level: str, split: str) -> tuple[str, ...]:
    """The databases of a level and split."""
    group = "ood" if split == "ood" else "main"
    more = {"main": "deep", "ood": "deep_ood"}[group]
    return GROUPS[group] + (GROUPS[more] if level in DEEP else ())


@functools.cache
def _table(level: str, split: str) -> tuple[dict[str, int], dict[str, list[Recipe]]]:
    if level in DEEP:
        plain, unseen = DEEP[level]
        shaped = plain | (unseen if split == "ood" else {})
        kinds = {kind: weight for kind, (_, weight) in shaped.items()}
        made = [_deep(databases()[name], shaped) for name in groups(level, split)]
    else:
        kinds = dict(QUICK if level == "quick" else STANDARD)
        if split == "ood":
            kinds |= QUICK_OOD if level == "quick" else STANDARD_OOD
        make = _quick if level == "quick" else _standard
        made = [make(databases()[name]) for name in groups(level, split)]
    found: dict[str, list[Recipe]] = {kind: [] for kind in kinds}
    for recipe in (recipe for part in made for recipe in part):
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


# Numbers that are names or places in an order: their sums and means say nothing.
_NO_MEASURE = {
    "year", "number", "found", "independence", "position", "latitude", "longitude", "version", "foundation", "opening",
    "code", "major", "state", "hour", "period",
}  # fmt: skip


def _deep(database: Database, kinds: dict[str, tuple[str, int]]) -> list[Recipe]:
    shapes = _shapes(database)
    return [replace(plain, kind=kind) for kind, (shape, _) in kinds.items() for plain in shapes.get(shape, ())]


def _shapes(database: Database) -> dict[str, list[Recipe]]:
    """What a database offers, by shape: `child` is a table with a labelled parent, `far` one whose parent has a
    labelled parent of its own; `number`, `cat`, `date`, `label` say which columns the table must have beside."""
    out: dict[str, list[Recipe]] = {}

    def add(shape: str, plain: Recipe, **columns: str) -> None:
        out.setdefault(shape, []).append(replace(plain, **columns))

    for table in database.tables.values():
        here = Recipe("", database.name, table.name)
        numbers = [c.name for c in table.having("number") if c.name not in _NO_MEASURE]
        cats = [c.name for c in table.having("cat")]
        forms = [(here, "")]
        for ref, parent in _links(database, table):
            child = replace(here, ref=ref, parent=parent.name)
            if parent.label:
                forms.append((child, "child_"))
                add("child", child)
            for up, far in _links(database, parent):
                if far.label and far.name not in (table.name, parent.name):
                    forms.append((replace(child, up=up, far=far.name), "far_"))
                    add("far", replace(child, up=up, far=far.name))
        for plain, prefix in forms:
            for number in numbers:
                add(f"{prefix}number", plain, column=number)
                for cat in cats:
                    add(f"{prefix}number_cat", plain, column=number, other=cat)
                for day in table.dates:
                    add(f"{prefix}date_number", plain, column=number, day=day)
            for cat in cats:
                add(f"{prefix}cat", plain, other=cat)
                for day in table.dates:
                    add(f"{prefix}date_cat", plain, other=cat, day=day)
            for day in table.dates:
                add(f"{prefix}date", plain, day=day)
            if table.label and table.key:
                add(f"{prefix}label", plain)
        if any(c.name == "year" for c in table.columns):
            for number in numbers:
                add("year_number", here, column=number)
        if table.label:
            for number in numbers:
                add("label_number", here, column=number)
                for cat in cats:
                    add("label_number_cat", here, column=number, other=cat)
            for cat in cats:
                add("label_cat", here, other=cat)
            if table.key and len(table.columns) > 3:
                add("label_key", here)
    return out
