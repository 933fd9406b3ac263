"""The ledger: every drawn member has exactly one end, also across kills and rollbacks."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.ledger import Ledger, LedgerError
from springtide.trace import TaskRef, make_version

TASK = TaskRef("db/quick/train/3", "db", "1", "train", "quick", 3, 9, ("hard",))


def fresh(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(0)
    return ledger


def test_a_visit_ends_once(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    ledger.draw(0, TASK, 0, 8, make_version(0, 0))
    with pytest.raises(LedgerError, match="not ready"):
        ledger.trained([0], 0, 1)
    ledger.ready(0, "0.msgpack", {"members": []})
    ledger.trained([0], 0, 1)
    with pytest.raises(LedgerError, match="not ready"):
        ledger.trained([0], 0, 2)
    with pytest.raises(LedgerError, match="cannot be dropped"):
        ledger.drop(0, "stale")
    assert ledger.audit()["trained"] == 8


def test_a_step_is_recorded_whole_or_not_at_all(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    for visit in range(2):
        ledger.draw(visit, TASK, visit, 4, 0)
    ledger.ready(0, "0", {})
    with pytest.raises(LedgerError):
        ledger.trained([0, 1], 0, 1)
    assert [row.visit for row in ledger.visits("ready")] == [0]


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    ledger.draw(5, TASK, 2, 4, make_version(1, 3))
    ledger.ready(5, "5.msgpack", {"members": [[0, "completed", 1.0, True, 9]]})
    (row,) = ledger.visits("ready")
    assert (row.task, row.draw, row.n, row.birth, row.path) == (TASK, 2, 4, make_version(1, 3), "5.msgpack")
    assert row.summary == {"members": [[0, "completed", 1.0, True, 9]]}
    assert ledger.next_visit() == 6
    assert ledger.draws() == {"db": 1}


def test_kills_use_up_no_retry(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    ledger.draw(0, TASK, 0, 2, 0)
    ledger.attempt(0, 0, 0, status="environment_error", cause="worker_lost", killed=True)
    ledger.attempt(0, 0, 1, status="environment_error", cause="tool")
    ledger.attempt(0, 0, 2, status="completed", reward=1.0)
    assert ledger.retries_used(0) == {0: (3, 1)}


def test_a_rollback_makes_ready_what_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    for visit, step in enumerate([1, 2, 3]):
        ledger.draw(visit, TASK, visit, 4, make_version(0, step - 1))
        ledger.ready(visit, str(visit), {})
        ledger.trained([visit], 0, step)
    ledger.close()
    resumed = Ledger(tmp_path / "ledger.sqlite")
    assert resumed.begin(step=1) == 1
    assert [r.visit for r in resumed.visits("ready")] == [1, 2]
    assert [r.visit for r in resumed.visits("trained")] == [0]
    resumed.trained([1, 2], 1, 2)
    assert resumed.audit()["trained"] == 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "UPDATE meta SET value = '0' WHERE key = 'schema'",
            "schema 0, of an older .*start a new run, or end",
        ),
        (
            "UPDATE meta SET value = '99' WHERE key = 'schema'",
            "schema 99, written by a newer .*: update it",
        ),
        ("UPDATE meta SET value = 'one' WHERE key = 'schema'", "damaged"),
        ("DELETE FROM meta WHERE key = 'schema'", "the ledger has no schema; it is damaged"),
        ("ALTER TABLE attempts DROP COLUMN killed", "table attempts has columns .*though it says schema 1"),
        ("ALTER TABLE visits RENAME COLUMN birth TO version", "table visits has columns"),
        ("DROP TABLE rollbacks", r"table rollbacks has columns \[\]"),
        ("DROP TABLE meta", "no such table: meta"),
    ],
)
def test_a_ledger_of_another_version_is_refused_in_one_line_and_left_as_it_is(
    tmp_path: Path, change: str, says: str
) -> None:
    fresh(tmp_path).close()
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute(change)
    db.close()
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=says) as raised:
            Ledger(path, read_only=read_only)
        assert "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.sqlite"]
    assert path.read_bytes() == before


def test_a_damaged_ledger_is_one_clear_line(tmp_path: Path) -> None:
    ledger = fresh(tmp_path)
    for visit in range(400):
        ledger.draw(visit, TASK, visit, 8, 0)
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64  # inside the visits, where nothing else would look
    path.write_bytes(data)
    with pytest.raises(LedgerError, match="damaged") as raised:
        Ledger(path)
    assert "\n" not in str(raised.value)
    (tmp_path / "bad").write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(tmp_path / "bad")


def test_what_a_later_incarnation_went_behind_does_not_survive(tmp_path: Path) -> None:
    """A checkpoint that was passed over must not come back: what it learned was learned again since."""
    ledger = fresh(tmp_path)
    assert ledger.begin(step=10) == 1
    assert ledger.survives(0, 10) and not ledger.survives(0, 11)
    assert ledger.begin(step=30) == 2
    assert ledger.survives(0, 10) and ledger.survives(1, 30) and not ledger.survives(1, 31)
    assert ledger.survives(2, 99)


def test_a_reader_changes_nothing_and_sees_what_a_killed_run_left_in_the_log(tmp_path: Path) -> None:
    run = tmp_path / "run's own #1"
    run.mkdir()
    writer = fresh(run)
    writer.draw(0, TASK, 0, 4, 0)
    seen = Ledger(run / "ledger.sqlite", read_only=True)
    assert seen.audit()["open"] == 4, "beside a run"
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        seen.drop(0, "stale")
    seen.close()
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        (killed / name).write_bytes((run / name).read_bytes())
    assert Ledger(killed / "ledger.sqlite", read_only=True).audit()["open"] == 4
    writer.close()
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    seen = Ledger(run / "ledger.sqlite", read_only=True)
    assert seen.audit()["open"] == 4, "after it"
    seen.close()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    with pytest.raises(sqlite3.OperationalError):
        Ledger(tmp_path / "none.sqlite", read_only=True)
    assert not (tmp_path / "none.sqlite").exists()


def test_what_is_synced_is_in_the_file_itself(tmp_path: Path) -> None:
    """A checkpoint is durable at once; a power cut must not leave a ledger that knows less than it."""
    ledger = fresh(tmp_path)
    ledger.draw(0, TASK, 0, 4, 0)

    def drawn(name: str) -> int:
        (tmp_path / name).write_bytes((tmp_path / "ledger.sqlite").read_bytes())
        return sqlite3.connect(tmp_path / name).execute("SELECT count(*) FROM visits").fetchone()[0]

    ledger.sync()
    ledger.draw(1, TASK, 1, 4, 0)
    assert drawn("a") == 1
    ledger.sync()
    assert drawn("b") == 2


def test_a_start_that_was_killed_before_it_made_the_tables_is_made_good(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL").connection.close()
    ledger = Ledger(path)
    assert ledger.begin(0) == 0
    assert ledger.next_visit() == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_audit_always_adds_up_whatever_is_killed_when(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """NeMo-RL#3599, trl#5863: after any number of kills each drawn member is trained once, pending, or dropped."""
    path = tmp_path_factory.mktemp("ledger") / "l.sqlite"
    rng = random.Random(seed)
    step = saved = 0
    incarnation = 0
    ledger = Ledger(path)
    ledger.begin(0)
    for _ in range(60):
        match rng.choice(["draw", "draw", "ready", "ready", "train", "drop", "save", "kill"]):
            case "draw":
                ledger.draw(ledger.next_visit(), TASK, 0, 4, make_version(incarnation, step))
            case "ready" if rows := ledger.visits("open"):
                ledger.ready(rng.choice(rows).visit, "f", {})
            case "train" if rows := ledger.visits("ready"):
                step += 1
                ledger.trained([r.visit for r in rows[:3]], incarnation, step)
            case "drop" if rows := ledger.visits("open", "ready"):
                ledger.drop(rng.choice(rows).visit, "equal_rewards")
            case "save":
                saved = step
            case "kill":
                ledger.close()
                ledger = Ledger(path)
                step = saved
                incarnation = ledger.begin(step)
        audit = ledger.audit()
        assert audit["drawn"] == audit["trained"] + audit["ready"] + audit["open"] + sum(audit["dropped"].values())
        assert all((r.step or 0) <= step for r in ledger.visits("trained"))
    ledger.close()
