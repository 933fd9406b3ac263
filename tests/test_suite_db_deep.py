"""The db suite's levels `hard` and `expert`: real databases, many kinds, gold right on all copies, no shortcuts."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import sqlite3
import statistics
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from springtide.env import InProcessClient
from springtide.suites.db import SUITE
from springtide.suites.db.catalog import ABOUT, GROUPS, WAREHOUSES, Side, databases, read_rows, warehouse
from springtide.suites.db.copies import ImageCopies, connect, create_table
from springtide.suites.db.deep import KINDS
from springtide.suites.db.environment import CAPS, SIZES, draw_question, make_question
from springtide.suites.db.guard import GuardedConnection
from springtide.suites.db.judge import judge
from springtide.suites.db.library import Library
from springtide.suites.db.misses import all_wrong, near_misses
from springtide.suites.db.naming import draw_names
from springtide.suites.db.question import Question, is_fair
from springtide.suites.db.recipes import DEEP, _table, groups, recipes
from springtide.trace import Message, Outcome, ToolCall

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("benchmarks", "scripts")]
baselines, db, db_tables = (importlib.import_module(name) for name in ("baselines", "db", "db_tables"))

LEVELS = ("hard", "expert")
SPLITS = ("train", "test", "ood")
LIBRARY = Library()


@cache
def question(level: str, split: str, index: int) -> Question:
    return make_question(SUITE.tasks(split, level)[index], LIBRARY)


def sample(level: str, split: str, every: int) -> Iterator[Question]:
    return (question(level, split, index) for index in range(0, SIZES[split], every))


def right(asked: Question, sql: str, level: str, writes: tuple[str, ...] = ()) -> bool:
    return all(ok for ok, _ in judge(asked, sql, writes, CAPS[level]))


async def play(level: str, split: str, index: int, calls: list[tuple[str, str]] | None) -> Outcome:
    async with InProcessClient([SUITE]) as client:
        session = await client.open(SUITE.tasks(split, level)[index].ref, 0, 0, 0, 60.0)
        gold = await session.author_gold()
        assert gold is not None
        turns = gold if calls is None else [ToolCall("c", n, json.dumps({"sql": sql})) for n, sql in calls]
        for number, call in enumerate(turns):
            await session.act(Message("assistant", "", (call,)), number)
        outcome = await session.finish("done")
        await session.close()
        return outcome


# --- what there is ----------------------------------------------------------------------------------------------------


def test_there_are_enough_real_databases_and_kinds_of_question() -> None:
    assert len(databases()) >= 27 and {name for names in GROUPS.values() for name in names} == set(databases())
    attribution = (Path(baselines.__file__).parents[1] / "src/springtide/suites/db/ATTRIBUTION.md").read_text()
    for name in databases():
        assert re.search(rf"`{name}(\.json\.gz)?`", attribution), f"{name} has no attribution"
        assert sum(map(len, read_rows(name).values())) >= 12, name
    kinds = {kind for level in SUITE.levels for split in SPLITS for kind in recipes(level, split)}
    assert len(kinds) >= 80
    assert set(KINDS) == {kind for level in LEVELS for part in DEEP[level] for kind in part}


@pytest.mark.parametrize("level", LEVELS)
def test_every_kind_can_be_asked_and_is_drawn(level: str) -> None:
    for split in SPLITS:
        plain, unseen = DEEP[level]
        weights, found = _table(level, split)
        assert set(weights) == set(plain) | (set(unseen) if split == "ood" else set())
        assert all(found[kind] for kind in weights)
    assert recipes(level, "test") == recipes(level, "train")


def test_what_is_ood_at_one_level_is_so_at_every_level() -> None:
    seen = {name for level in SUITE.levels for name in groups(level, "train")}
    unseen = {name for level in SUITE.levels for name in groups(level, "ood")}
    assert not seen & unseen
    for level in LEVELS:
        asked = {r.database for kind in recipes(level, "train").values() for r in kind}
        assert len(asked) >= 8 and len({r.database for kind in recipes(level, "ood").values() for r in kind}) >= 14


@pytest.mark.parametrize("level", LEVELS)
def test_train_and_test_name_different_entities(level: str) -> None:
    named = {s: {e.casefold() for q in sample(level, s, 5) for e in q.entities} for s in ("train", "test")}
    assert len(named["train"]) > 80 and len(named["test"]) > 20
    assert not named["train"] & named["test"]


@pytest.mark.parametrize("level", LEVELS)
def test_skeletons_of_ood_are_its_own(level: str) -> None:
    skeletons = {split: {q.skeleton for q in sample(level, split, 5)} for split in SPLITS}
    assert len(skeletons["train"]) >= 100 and len(skeletons["ood"]) >= 50
    assert not skeletons["ood"] & (skeletons["train"] | skeletons["test"])


def test_the_page_shows_what_there_is_and_what_was_measured() -> None:
    page = db_tables.PAGE.read_text()
    assert db_tables.generate(page) == page, "run python scripts/db_tables.py"
    stored = json.loads((Path(db.__file__).with_name("results") / "db.json").read_text())
    assert baselines.policy_table(stored) in page
    assert len(stored["rows"]) == len(SUITE.levels) * 2 * 8 and all(row["met"] for row in stored["rows"])


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_an_expert_schema_is_large_and_its_columns_are_ambiguous() -> None:
    for members in WAREHOUSES:
        assert len(warehouse(members).tables) >= 20
    for asked in sample("expert", "train", 60):
        assert asked.text.startswith("About the ")
        assert isinstance(asked.copies, ImageCopies)
        names = asked.copies.names
        columns = [column.lower() for column in names.columns.values()]
        assert len(columns) - len(set(columns)) >= 20, "names that more than one table has"


def test_a_column_without_its_table_is_ambiguous_in_an_expert_join() -> None:
    failed = 0
    for asked in sample("expert", "ood", 4):
        joined = re.search(r"FROM (\w+) JOIN (\w+) ON", asked.answer)
        if joined is None:
            continue
        connection = asked.copies.open(0)
        shared = set.intersection(
            *({c.lower() for _, c, *_ in connection.execute(f"PRAGMA table_info({t})")} for t in joined.groups())
        )
        for column in sorted(shared)[:1]:
            with pytest.raises(sqlite3.OperationalError, match="ambiguous"):
                connection.execute(f"SELECT {column} FROM {joined[1]} JOIN {joined[2]}")
            failed += 1
        connection.close()
    assert failed >= 10


def test_names_of_the_deep_levels_need_no_quotes_and_are_unique() -> None:
    for members in WAREHOUSES:
        for seed in range(15):
            connection = connect()
            for name in members:
                tables = list(databases()[name].tables.values())
                names = draw_names(tables, "expert", random.Random(seed), prefix=ABOUT[name][1])
                for table in tables:
                    connection.execute(create_table(table, names))  # raises for keywords and duplicates
            connection.close()


def test_gold_finds_every_table_in_what_the_policy_is_shown() -> None:
    for level in LEVELS:
        for asked in sample(level, "ood", 25):
            guarded = GuardedConnection(asked.copies.open(0), CAPS[level])
            listed = guarded.show("PRAGMA table_list").split()
            for lookup in asked.lookups[1:]:
                columns = guarded.show(lookup)
                assert lookup.split("(")[1].rstrip(")") in listed and "..." not in columns
            guarded.close()


# --- gold and shortcuts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_gold_is_right_and_fair(level: str, split: str) -> None:
    for asked in sample(level, split, 25):
        assert is_fair(asked, all_differ=False), asked
        assert right(asked, asked.answer, level), asked


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_gold_is_right_and_fair_on_every_task(level: str, split: str) -> None:
    for asked in sample(level, split, 1):
        assert is_fair(asked, all_differ=False), asked
        assert right(asked, asked.answer, level), asked
        assert all_wrong(asked, CAPS[level].instructions), asked


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["test", "ood"])
def test_every_near_miss_of_gold_is_judged_wrong(level: str, split: str) -> None:
    tried = 0
    for asked in sample(level, split, 20):
        for sql in near_misses(asked.answer):
            assert not right(asked, sql, level), (asked, sql)
            tried += 1
    assert tried > 50


def test_gold_that_takes_more_than_its_budget_is_not_fair() -> None:
    asked = question("hard", "train", 0)
    assert is_fair(asked, all_differ=False, budget=CAPS["hard"].instructions)
    assert not is_fair(asked, all_differ=False, budget=1_000)


def test_a_draw_that_finds_nothing_to_name_is_no_question() -> None:
    class Empty(Library):
        def _pool(self, database: str, side: Side, table: str, column: str) -> tuple[()]:
            return ()

    empty = Empty()
    for level in LEVELS:
        drawn = [draw_question(level, "train", seed, 0, empty) for seed in range(20)]
        assert drawn.count(None) >= 10
        assert not any(asked.entities for asked in drawn if asked is not None)


def test_near_misses_leave_texts_and_joins_alone() -> None:
    sql = "SELECT AVG(a.x) FROM a JOIN b ON a.r = b.k WHERE b.n = 'c > d AND AVG(e' AND a.x < 3 AND a.y IS NOT NULL"
    assert near_misses(sql) == [
        sql.replace("b.n = 'c > d AND AVG(e'", "1"),
        sql.replace("a.x < 3", "1"),
        sql.replace("x < 3", "x > 3"),
        sql.replace("AVG(a.x)", "MAX(a.x)"),
    ]
    assert near_misses("SELECT b FROM t GROUP BY b HAVING COUNT(*) >= 4") == [
        "SELECT b FROM t GROUP BY b HAVING 1",
        "SELECT b FROM t GROUP BY b HAVING COUNT(*) > 4",
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_gold_played_as_calls_succeeds_within_the_turns(level: str) -> None:
    for split, index in (("train", 0), ("train", 9), ("test", 3), ("ood", 5)):
        outcome = asyncio.run(play(level, split, index, None))
        assert outcome.status == "completed" and outcome.success and outcome.reward == 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["test", "ood"])
def test_policies_that_cannot_do_the_tasks_score_under_a_tenth(level: str, split: str) -> None:
    policies = db.UNTRAINED | {n: (p, 1) for n, p in db.learned(level, LIBRARY).items()}
    for name, (won, episodes) in db.measure(level, split, policies, 30, LIBRARY).items():
        assert won / episodes < 0.1, f"{name} succeeds in {won} of {episodes}"


@pytest.mark.parametrize("level", LEVELS)
def test_the_right_constant_is_wrong(level: str) -> None:
    tried = 0
    for asked in sample(level, "train", 50):
        if asked.writes:
            continue
        connection = asked.copies.open(0)
        rows = connection.execute(asked.answer).fetchall()
        connection.close()
        assert not right(asked, "VALUES " + ", ".join(map(_literals, rows)), level), asked
        tried += 1
    assert tried >= 10


def _literals(row: tuple[object, ...]) -> str:
    return "(" + ", ".join("'" + v.replace("'", "''") + "'" if isinstance(v, str) else repr(v) for v in row) + ")"


@pytest.mark.parametrize("level", LEVELS)
def test_a_change_must_be_exactly_right(level: str) -> None:
    index = next(
        i for i in range(SIZES["train"])
        if question(level, "train", i).writes and " WHERE " in question(level, "train", i).answer
        and question(level, "train", i).answer.startswith(("UPDATE", "DELETE"))
    )  # fmt: skip
    asked = question(level, "train", index)
    everywhere = asked.answer.split(" WHERE ")[0]
    table = asked.answer.removeprefix("UPDATE ").removeprefix("DELETE FROM ").split()[0]
    one_more = f"DELETE FROM {table} WHERE rowid = (SELECT MIN(rowid) FROM {table})"
    tried = lambda calls: asyncio.run(play(level, "train", index, calls)).success  # noqa: E731
    assert tried([("execute_sql", asked.answer), ("commit_final_answer", "SELECT 1")])
    assert not tried([("commit_final_answer", everywhere)])
    assert not tried([("execute_sql", one_more), ("commit_final_answer", asked.answer)])


def _first(level: str, kind_start: str) -> Question:
    return next(q for q in sample(level, "train", 1) if re.search(kind_start, q.text))


def test_a_right_answer_may_be_written_otherwise() -> None:
    asked = _first("hard", r"^How many other \w+ have the same ")
    table, column, where = re.search(r"FROM (\w+) WHERE \w+\.(\w+) = \(SELECT .* WHERE (.*)\)$", asked.answer).groups()  # type: ignore[union-attr]
    label = where.split(" = ")[0]
    other = f"SELECT COUNT(*) FROM {table} a JOIN {table} b ON a.{column} = b.{column} AND a.rowid <> b.rowid"
    assert right(asked, f"{other} WHERE a.{label.split('.')[1]} = {where.split(' = ', 1)[1]}", "hard")
    assert not right(asked, asked.answer.replace("COUNT(*) - 1", "COUNT(*)"), "hard")

    asked = _first("expert", r"how many have \w[\w ]* above the average .* of exactly these ")
    source, mean = re.search(r"^SELECT COUNT\(\*\) (FROM .*) AND ([\w.]+) > \(", asked.answer).groups()  # type: ignore[union-attr]
    window = f"SELECT SUM(v > m) FROM (SELECT {mean} AS v, AVG({mean}) OVER () AS m {source})"
    assert right(asked, window, "expert")
    assert not right(asked, asked.answer.replace(" > (", " < ("), "expert")


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_catalogue_is_listed_at_once_and_a_task_set_up_in_milliseconds(level: str) -> None:
    before = time.process_time()
    assert sum(len(list(SUITE.tasks(split, level))) for split in SPLITS) == sum(SIZES.values())
    assert time.process_time() - before < 1.0
    question(level, "train", 0)  # what a worker keeps is loaded
    spent = []
    for index in range(1, 240, 6):
        before = time.process_time()
        make_question(SUITE.tasks("train", level)[index], LIBRARY).copies.open(0).close()
        spent.append(time.process_time() - before)
    assert statistics.median(spent) < 0.025
