"""The tasks of `quick` and `standard` are what springtide-nano and the quickstart were built on: they never change.

A change of one of these digests voids every published figure of those levels. New depth goes into new levels.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json

import pytest

from springtide.env import InProcessClient
from springtide.suites.db import SUITE
from springtide.suites.db.catalog import GROUPS
from springtide.suites.db.copies import COPIES
from springtide.suites.db.environment import make_question
from springtide.suites.db.library import Library

# Taken before the levels `hard` and `expert` were written.
FROZEN = {
    ("quick", "train"): "b5ccaf32d7115cc6e724837daefea20c",
    ("quick", "test"): "43500bdd0226d75e14db201604217229",
    ("quick", "ood"): "b227ee86635b7952209874ba2749f8ed",
    ("standard", "train"): "032f1c45686bce002ab04aa1e95455c2",
    ("standard", "test"): "42a0302f5cd1d534ad2db36f49bd5699",
    ("standard", "ood"): "0a49bd2b8ce4bfd388278b31b3540bf9",
}
OPENINGS = {
    ("quick", "train"): "e8022fb5ad71f2c8daa83fe83e2721a8",
    ("quick", "test"): "619e51bbe45625743279caa6a86e008c",
    ("quick", "ood"): "48447148e32028a17b0b02dfad70363d",
    ("standard", "train"): "6ffc25aea785ab5fbf74933fd7e37a82",
    ("standard", "test"): "f79c9516373c405aaa8df4f5d31579d8",
    ("standard", "ood"): "e54632daeaf3b884c50fd242db50c210",
}
IMAGES = "2c5588f816b00d35bee33cc867367b12"


@functools.cache
def library() -> Library:
    return Library()


def digest(level: str, split: str, every: int) -> str:
    """Of a sample of tasks: seed, tags and limits, question, gold's calls, and what gold and the schema are on each
    copy."""
    found = hashlib.sha256()
    for task in SUITE.tasks(split, level)[::every]:
        question = make_question(task, library())
        assert task.limits is not None
        found.update(repr((task.id, task.version, task.seed, task.tags, task.limits.max_turns)).encode())
        found.update(repr((question.text, question.skeleton, question.entities, question.lookups)).encode())
        found.update(repr((question.answer, question.writes, question.ordered, question.unique)).encode())
        for copy in range(COPIES):
            connection = question.copies.open(copy)
            found.update(repr(connection.execute("SELECT sql FROM sqlite_schema").fetchall()).encode())
            if not question.writes:
                found.update(repr(connection.execute(question.answer).fetchall()).encode())
            connection.close()
    return found.hexdigest()[:32]


async def opening_digest(level: str, split: str) -> str:
    """Of the first messages and the tool schemas that a policy is given."""
    found = hashlib.sha256()
    async with InProcessClient([SUITE]) as client:
        for task in SUITE.tasks(split, level)[::97]:
            session = await client.open(task.ref, 0, 0, 0, 60.0)
            found.update(json.dumps([(m.role, m.text) for m in session.messages]).encode())
            found.update(json.dumps(session.tools, sort_keys=True).encode())
            await session.close()
    return found.hexdigest()[:32]


def images_digest() -> str:
    """Of every row of the three copies of every database that the two levels use."""
    found = hashlib.sha256()
    sides = {"main": ("train", "test"), "ood": ("ood",)}
    for group, databases in ((g, GROUPS[g]) for g in ("main", "ood")):
        for name in databases:
            for side in sides[group]:
                for image in library().images(name, side):
                    found.update(image)
    return found.hexdigest()[:32]


@pytest.mark.parametrize(("level", "split"), list(FROZEN))
def test_the_tasks_of_the_first_levels_stay_as_they_are(level: str, split: str) -> None:
    assert digest(level, split, 11) == FROZEN[level, split]


@pytest.mark.parametrize(("level", "split"), list(OPENINGS))
def test_the_openings_of_the_first_levels_stay_as_they_are(level: str, split: str) -> None:
    assert asyncio.run(opening_digest(level, split)) == OPENINGS[level, split]


def test_the_databases_of_the_first_levels_stay_as_they_are() -> None:
    assert images_digest() == IMAGES
