"""The guard of the db suite: nothing that a policy writes in SQL gets out, hangs, grows, or changes the schema."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.suites.db.copies import connect
from springtide.suites.db.guard import Caps, GuardedConnection, SqlError


@pytest.fixture
def guarded() -> Iterator[GuardedConnection]:
    connection = connect()
    connection.execute("CREATE TABLE pet (id INTEGER, name TEXT)")
    connection.executemany("INSERT INTO pet VALUES (?, ?)", [(i, f"pet {i}") for i in range(100)])
    made = GuardedConnection(connection, Caps(500_000, rows=10, characters=100))
    yield made
    made.close()


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '{path}' AS other",
        "ATTACH ':memory:' AS other",
        "VACUUM INTO '{path}'",
        "SELECT load_extension('{path}')",
        "SELECT * FROM fsdir('.')",
        "PRAGMA writable_schema = ON",
        "PRAGMA journal_mode = OFF",
        "PRAGMA temp_store_directory = '/'",
        "CREATE TABLE other (a)",
        "CREATE TEMP TABLE other (a)",
        "CREATE VIEW other AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON pet BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE f USING fts5(a)",
        "DROP TABLE pet",
        "ALTER TABLE pet RENAME TO other",
        "BEGIN",
        "SAVEPOINT s",
        "DELETE FROM sqlite_master",
        "SELECT 1; SELECT 2",
        "SELECT ?",
        "SELECT * FROM nowhere",
        "SELECT random()",
        "SELECT \x00",
        "",
    ],
)
def test_what_is_not_allowed_is_an_error_in_one_line(guarded: GuardedConnection, sql: str, tmp_path) -> None:
    path = tmp_path / "stolen.db"
    if sql:
        with pytest.raises(SqlError) as caught:
            guarded.show(sql.format(path=path))
        assert str(caught.value).startswith("Error: ") and "\n" not in str(caught.value)
    else:
        assert guarded.show(sql) == "no rows"
    assert not path.exists()
    assert guarded.show("SELECT COUNT(*) FROM pet") == "100"


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c",
        "SELECT COUNT(*) FROM pet a, pet b, pet c, pet d, pet e",
        "UPDATE pet SET id = (SELECT COUNT(*) FROM pet a, pet b, pet c, pet d)",
        "SELECT SUM(instr({long} || 'b' || a.id, {half} || 'c')) FROM pet a, pet b, pet c",
    ],
)
def test_a_runaway_statement_is_cut(guarded: GuardedConnection, sql: str) -> None:
    # trinity#2969, mini-swe-agent#803: a limit that is not enforced holds the worker.
    ten = "replace('aaaaaaaaaa', 'a', 'aaaaaaaaaa')"
    half = f"replace(replace({ten}, 'a', 'aaaaaaaaaa'), 'a', 'aaaa')"
    before = time.process_time()
    with pytest.raises(SqlError, match="too long"):
        guarded.show(sql.format(long=f"{half} || {half}", half=half))
    assert time.process_time() - before < 2.0
    assert guarded.show("SELECT SUM(id) FROM pet") == "4950"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM pet",
        "SELECT group_concat(name, '......') FROM pet",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
        "SELECT replace(hex(name), '7', '777777777777777777777') FROM pet",
    ],
)
def test_a_huge_result_is_cut_and_says_so(guarded: GuardedConnection, sql: str) -> None:
    text = guarded.show(sql)
    assert len(text) <= 110 and text.endswith("...")


@pytest.mark.parametrize(
    "call", ["printf('%.*c', 1500000000, 'x')", "format('%1500000000d', 1)", "zeroblob(999999999)"]
)
def test_a_function_that_no_budget_can_stop_is_refused(guarded: GuardedConnection, call: str) -> None:
    before = time.process_time()
    with pytest.raises(SqlError, match="not allowed"):
        guarded.show(f"SELECT {call}")
    assert time.process_time() - before < 0.5


def test_values_cannot_grow_without_bound(guarded: GuardedConnection) -> None:
    grown = "name"
    for _ in range(6):
        grown = f"replace({grown}, 'p', '{'p' * 40}')"
    with pytest.raises(SqlError, match="too big"):
        guarded.show(f"SELECT length({grown}) FROM pet")


_WORDS = re.findall(
    r"\S+",
    "SELECT FROM pet WHERE id name * = 1 'x' ( ) , UPDATE SET DELETE INSERT INTO VALUES COUNT ORDER BY LIMIT PRAGMA"
    " table_info RETURNING UNION WITH AS NULL x'ff' ; --",
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(_WORDS),
            max_size=12,
        ).map(" ".join),
    )
)
def test_any_text_is_answered_within_the_caps(sql: str) -> None:
    connection = connect()
    connection.execute("CREATE TABLE pet (id INTEGER, name TEXT)")
    connection.execute("INSERT INTO pet VALUES (1, 'a')")
    guarded = GuardedConnection(connection, Caps(100_000, rows=5, characters=80))
    try:
        text = guarded.show(sql)
    except SqlError as error:
        text = str(error)
    guarded.close()
    assert text and len(text) <= 140


def test_lookups_are_rendered_as_names(guarded: GuardedConnection) -> None:
    assert guarded.show("PRAGMA table_list") == "pet"
    assert guarded.show("pragma table_info('pet')") == "id name"
    assert guarded.show("SELECT name FROM sqlite_master") == "pet"
    assert guarded.show("SELECT sql FROM sqlite_master") == "CREATE TABLE pet (id INTEGER, name TEXT)"
    assert guarded.show("PRAGMA table_info(cars)") == "no rows"
    assert (
        guarded.show("SELECT id, name, NULL, 0.5 FROM pet LIMIT 2") == "0 | pet 0 | NULL | 0.5\n1 | pet 1 | NULL | 0.5"
    )
    assert guarded.show("DELETE FROM pet WHERE id < 3") == "3 rows changed"
    assert guarded.show("UPDATE pet SET id = 0 WHERE id = 5 RETURNING name") == "pet 5"
    assert guarded.touched == {"pet"}


def test_closing_a_database_ends_the_statement_that_another_thread_runs_on_it() -> None:
    guarded = GuardedConnection(connect(), Caps(instructions=10**12))
    said: list[str] = []
    began = threading.Event()

    def run() -> None:
        began.set()
        try:
            said.append(
                guarded.show("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT SUM(x) FROM c")
            )
        except SqlError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    time.sleep(0.05)
    guarded.close()
    thread.join(10)
    assert said == ["Error: interrupted"]
    with pytest.raises(SqlError, match="closed database"):
        guarded.show("SELECT 1")
