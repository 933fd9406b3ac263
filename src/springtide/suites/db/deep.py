"""Makes the questions of the levels `hard` and `expert`.

`hard` asks about one whole database; `expert` about one of several that lie in one schema of twenty tables and more,
with columns that bear the same names and words that are cut short. Invariants as in `standard`; a question that counts
parents by their children is asked only where no child points at a parent that is not there.
Called by: `environment`.
"""

from __future__ import annotations

import random

from springtide.suites.db import changes, expert, hard
from springtide.suites.db.catalog import ABOUT, Side, databases, warehouse, warehouse_of
from springtide.suites.db.copies import ImageCopies
from springtide.suites.db.library import Library
from springtide.suites.db.naming import Names, draw_names
from springtide.suites.db.pen import DeepPen
from springtide.suites.db.question import Question
from springtide.suites.db.recipes import Recipe

KINDS = hard.KINDS | expert.KINDS | changes.KINDS


def make_hard(recipe: Recipe, side: Side, library: Library, rng: random.Random) -> Question:
    """One try at a question about one database. It may still be unfair. Raises: NothingToName."""
    pen = DeepPen(recipe, side, library, rng)
    draft = KINDS[recipe.kind](pen)
    names = draw_names(pen.database.tables.values(), "hard", rng)
    copies = ImageCopies(pen.database, names, library.images(recipe.database, side))
    return draft.ask(names, copies, rng, more_unique=_no_orphans(pen))


def make_expert(recipe: Recipe, side: Side, library: Library, rng: random.Random) -> Question:
    """As `make_hard`, in a schema that holds other databases as well."""
    pen = DeepPen(recipe, side, library, rng)
    draft = KINDS[recipe.kind](pen)
    members = warehouse_of(recipe.database)
    drawn = {
        name: draw_names(databases()[name].tables.values(), "expert", rng, prefix=ABOUT[name][1]) for name in members
    }
    every = Names(
        {f"{d}__{t}": name for d, names in drawn.items() for t, name in names.tables.items()},
        {(f"{d}__{t}", c): name for d, names in drawn.items() for (t, c), name in names.columns.items()},
    )
    copies = ImageCopies(warehouse(members), every, library.warehouse(members, side))
    opening = f"About the {ABOUT[recipe.database][0]}: "
    return draft.ask(drawn[recipe.database], copies, rng, opening, _no_orphans(pen))


def _no_orphans(pen: DeepPen) -> tuple[str, ...]:
    """Statements that give 1 if every reference of the recipe leads somewhere and no key is borne twice."""
    steps = [(pen.ref, pen.p, pen.key_p, pen.t)] if pen.parent else []
    if pen.far:
        steps.append((pen.of(pen.parent, pen.recipe.up), pen.f, pen.key_f, pen.p))
    return tuple(
        sql
        for ref, target, key, source in steps
        for sql in (
            f"SELECT COUNT(*) = 0 FROM {source} WHERE {ref} NOT IN (SELECT {key} FROM {target})",
            f"SELECT COUNT(*) = COUNT(DISTINCT {key}) FROM {target}",
        )
    )
