"""The ledger: what was drawn, what became of it, and which step learned from it, in one SQLite file.

Owns: `ledger.sqlite`. One row a visit (a group), one row an attempt at a member, one row a change of a task's
capability. Invariants: a visit ends exactly once
along the surviving lineage, `trained` at one (incarnation, step) or `dropped` with a cause; a group's file is durable
before its visit is `ready`; an attempt that ended because a process died does not use up a retry.
Called by: the driver and its feeder; `observe` reads it. Every method is one transaction.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from springtide.trace import TaskRef

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE visits (
    visit INTEGER PRIMARY KEY, task TEXT NOT NULL, suite TEXT NOT NULL, draw INTEGER NOT NULL, n INTEGER NOT NULL,
    birth INTEGER NOT NULL,                     -- the newest weight version when it was drawn
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'trained', 'dropped')),
    cause TEXT, path TEXT, summary TEXT,        -- summary: what the driver needs of the group, as JSON
    incarnation INTEGER, step INTEGER,          -- where it was trained
    drawn_at REAL NOT NULL, ended_at REAL);
CREATE INDEX visits_state ON visits (state);
CREATE TABLE attempts (
    visit INTEGER NOT NULL, member INTEGER NOT NULL, retry INTEGER NOT NULL,
    status TEXT NOT NULL, cause TEXT, detail TEXT, reward REAL, success INTEGER, tokens INTEGER NOT NULL DEFAULT 0,
    killed INTEGER NOT NULL DEFAULT 0,          -- lost to a killed process: uses up no retry
    PRIMARY KEY (visit, member, retry));
CREATE TABLE capability (                       -- a row a played visit, in the order they ended
    place INTEGER PRIMARY KEY, visit INTEGER NOT NULL UNIQUE, suite TEXT NOT NULL, task TEXT NOT NULL,
    wins INTEGER NOT NULL, played INTEGER NOT NULL,
    p REAL NOT NULL);                           -- the task's capability from then on
CREATE TABLE rollbacks (incarnation INTEGER PRIMARY KEY, to_step INTEGER NOT NULL, visits INTEGER NOT NULL, at REAL);
"""
_NOT_ITS_CONTENT = tuple(f"SQLITE_{fault}" for fault in ("FULL", "IOERR", "BUSY", "LOCKED", "READONLY", "CANTOPEN"))


class LedgerError(Exception):
    """The ledger cannot be used (another schema, a damaged file), or was asked for something that contradicts it."""


@dataclass(frozen=True, slots=True)
class VisitRow:
    """One visit as the ledger holds it."""

    visit: int
    task: TaskRef
    draw: int
    n: int
    birth: int
    state: str
    cause: str | None
    path: str | None
    summary: dict[str, Any] | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a visit said of its task: `wins` of `played` members, and the task's capability `p` from then on."""

    visit: int
    suite: str
    task: str
    wins: int
    played: int
    p: float


class Ledger:
    """Opens or creates `path`; `read_only` needs it to exist and changes nothing. Not shared between threads."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._db = sqlite3.connect(_read_only(path) if read_only else path, isolation_level=None, uri=read_only)
        try:
            if not read_only:
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._create()
            self._check(path, whole=not read_only)
            if not read_only:  # only now: another version's ledger stays as it is
                self._db.execute("PRAGMA journal_mode = WAL")
        except (sqlite3.DatabaseError, ValueError) as error:
            self._db.close()
            if getattr(error, "sqlite_errorname", "").startswith(_NOT_ITS_CONTENT):
                raise
            raise LedgerError(f"{path} is not a ledger or is damaged: {error}; start a new run") from None
        except LedgerError:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def sync(self) -> None:
        """Put all that was recorded on the disk itself: a checkpoint must not outlive what the ledger says of it."""
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    # --- a visit's life ---------------------------------------------------------------------------------------------

    def draw(self, visit: int, task: TaskRef, draw: int, n: int, birth: int) -> None:
        """Record that `task` was drawn as the suite's `draw`-th, before anything of it starts."""
        self._db.execute(
            "INSERT INTO visits (visit, task, suite, draw, n, birth, state, drawn_at) VALUES (?,?,?,?,?,?,'open',?)",
            (visit, json.dumps(asdict(task)), task.suite, draw, n, birth, time.time()),
        )

    def attempt(
        self,
        visit: int,
        member: int,
        retry: int,
        *,
        status: str,
        cause: str | None = None,
        detail: str = "",
        reward: float | None = None,
        success: bool | None = None,
        tokens: int = 0,
        killed: bool = False,
    ) -> None:
        """Record how one attempt at a member ended."""
        self._db.execute(
            "INSERT INTO attempts VALUES (?,?,?,?,?,?,?,?,?,?)",
            (visit, member, retry, status, cause, detail[:2000], reward, success, tokens, killed),
        )

    def ready(self, visit: int, path: str, summary: dict[str, Any]) -> None:
        """The group's file `path` is durable and may be trained."""
        self._move(visit, "open", "ready", path=path, summary=json.dumps(summary))

    def trained(self, visits: list[int], incarnation: int, step: int) -> None:
        """All of `visits` were learned from by one optimiser step."""
        with self._transaction():
            for visit in visits:
                self._move(visit, "ready", "trained", incarnation=incarnation, step=step, ended_at=time.time())

    def drop(self, visit: int, cause: str) -> None:
        """The visit ends without being trained; `cause` is counted."""
        row = self._db.execute("SELECT state FROM visits WHERE visit = ?", (visit,)).fetchone()
        if row is None or row[0] not in ("open", "ready"):
            raise LedgerError(f"visit {visit} cannot be dropped: it is {row[0] if row else 'unknown'}")
        self._move(visit, row[0], "dropped", cause=cause, ended_at=time.time())

    def learned(self, outcome: Outcome) -> None:
        """A visit's members were played and scored; each visit says so once."""
        self._db.execute(
            "INSERT INTO capability (visit, suite, task, wins, played, p) VALUES (?,?,?,?,?,?)",
            (outcome.visit, outcome.suite, outcome.task, outcome.wins, outcome.played, outcome.p),
        )

    def knows(self, visit: int) -> bool:
        """Whether the visit's outcome is recorded: it was played to its end before, and lost on the way to `ready`."""
        return self._db.execute("SELECT 1 FROM capability WHERE visit = ?", (visit,)).fetchone() is not None

    def same_as_before(self, what: str, fingerprint: str) -> bool:
        """Whether `what` had this fingerprint when the run began; the first one given is remembered."""
        before = self._get(f"fingerprint/{what}", fingerprint)
        self._set(f"fingerprint/{what}", before)
        return before == fingerprint

    # --- resume -----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> int:
        """Start an incarnation at checkpoint step `step`; returns its number (0 for a fresh ledger's first).

        What was trained after the checkpoint is ready again. None of it is too old: it was inside the staleness bound
        at a later step, and the bound is not one of the keys that a resume may change.
        """
        started = self._get("started", "0") == "1"
        incarnation = int(self._get("incarnation")) + (1 if started else 0)
        with self._transaction():
            self._set("incarnation", incarnation)
            self._set("started", 1)
            if started:
                again = self._db.execute(
                    "UPDATE visits SET state = 'ready', incarnation = NULL, step = NULL, ended_at = NULL"
                    " WHERE state = 'trained' AND step > ?",
                    (step,),
                ).rowcount
                self._db.execute("INSERT INTO rollbacks VALUES (?,?,?,?)", (incarnation, step, again, time.time()))
        return incarnation

    def survives(self, incarnation: int, step: int) -> bool:
        """Whether what `incarnation` had trained at `step` is what the run goes on from: no rollback went behind it."""
        behind = "SELECT count(*) FROM rollbacks WHERE incarnation > ? AND to_step < ?"
        return self._db.execute(behind, (incarnation, step)).fetchone()[0] == 0

    def retries_used(self, visit: int) -> dict[int, tuple[int, int]]:
        """member -> (the next retry number, failed attempts that count against its budget)."""
        rows = self._db.execute(
            "SELECT member, max(retry) + 1, sum(NOT killed AND status = 'environment_error') FROM attempts"
            " WHERE visit = ? GROUP BY member",
            (visit,),
        ).fetchall()
        return {member: (next_retry, failures) for member, next_retry, failures in rows}

    def visits(self, *states: str) -> list[VisitRow]:
        """Visits in any of `states`, oldest first."""
        marks = ",".join("?" * len(states))
        rows = self._db.execute(
            "SELECT visit, task, draw, n, birth, state, cause, path, summary, step FROM visits"
            f" WHERE state IN ({marks}) ORDER BY visit",
            states,
        ).fetchall()
        return [
            VisitRow(
                v,
                TaskRef(**{**(t := json.loads(task)), "tags": tuple(t["tags"])}),
                draw,
                n,
                birth,
                state,
                cause,
                path,
                json.loads(summary) if summary else None,
                step,
            )
            for v, task, draw, n, birth, state, cause, path, summary, step in rows
        ]

    def outcomes(self) -> list[Outcome]:
        """What was learned of tasks, in the order in which it was."""
        query = "SELECT visit, suite, task, wins, played, p FROM capability ORDER BY place"
        return [Outcome(*row) for row in self._db.execute(query)]

    def last_draws(self) -> list[tuple[str, str, int]]:
        """(suite, task, its newest draw) of every task that was drawn."""
        query = "SELECT suite, json_extract(task, '$.id') AS id, max(draw) FROM visits GROUP BY suite, id"
        return self._db.execute(query).fetchall()

    # --- counts -----------------------------------------------------------------------------------------------------

    def next_visit(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(visit) + 1, 0) FROM visits").fetchone()[0])

    def draws(self) -> Counter[str]:
        """Suite -> how many of its tasks were drawn."""
        return Counter(dict(self._db.execute("SELECT suite, count(*) FROM visits GROUP BY suite")))

    def consumed(self) -> Counter[str]:
        """Suite -> how many of its groups were trained."""
        return Counter(
            dict(self._db.execute("SELECT suite, count(*) FROM visits WHERE state='trained' GROUP BY suite"))
        )

    def audit(self) -> dict[str, Any]:
        """What became of every drawn member: `drawn = trained + ready + open + sum(dropped by cause)`."""
        totals: Counter[str] = Counter()
        causes: Counter[str] = Counter()
        for state, cause, members in self._db.execute("SELECT state, cause, sum(n) FROM visits GROUP BY state, cause"):
            totals[state] += members
            if state == "dropped":
                causes[cause] += members
        killed, failed = self._db.execute(
            "SELECT coalesce(sum(killed), 0), coalesce(sum(NOT killed AND status = 'environment_error'), 0)"
            " FROM attempts"
        ).fetchone()
        return {
            "drawn": sum(totals.values()),
            "trained": totals["trained"],
            "ready": totals["ready"],
            "open": totals["open"],
            "dropped": dict(causes),
            "attempts_killed": killed,
            "attempts_failed": failed,
        }

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """The tables, all or none: also where a start was killed before it had made them."""
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            values = f"INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}'), ('incarnation', '0');"
            self._db.executescript(f"BEGIN; {_SCHEMA} {values} COMMIT;")

    def _check(self, path: Path, *, whole: bool) -> None:
        """Refuse another version's ledger, and one that is not what was written. Raises: LedgerError."""
        found = int(self._get("schema"))
        if found > SCHEMA_VERSION:
            raise LedgerError(
                f"{path} has schema {found}, written by a newer Springtide; this one reads {SCHEMA_VERSION}: update it"
            )
        if found < SCHEMA_VERSION:  # there is none yet: from 2 on, this is where it is migrated
            raise LedgerError(
                f"{path} has schema {found}, of an older Springtide; this one reads {SCHEMA_VERSION}: start a new run, "
                "or end this one with the version that began it"
            )
        with contextlib.closing(sqlite3.connect(":memory:")) as ours:
            ours.executescript(_SCHEMA)
            for table, columns in _tables(ours).items():  # one that lacks a column would be found out in mid-run
                if (there := _tables(self._db).get(table, [])) != columns:
                    raise LedgerError(
                        f"{path}: table {table} has columns {there}, not {columns}, though it says schema {found}: it "
                        "was written by an unreleased Springtide, or is damaged; start a new run"
                    )
        if whole:
            problems = [row[0] for row in self._db.execute("PRAGMA quick_check(1)")]
            if problems != ["ok"]:
                raise LedgerError(f"{path} is damaged: {' '.join(problems[0].split())}; start a new run")

    def _move(self, visit: int, before: str, after: str, **values: Any) -> None:
        sets = "".join(f", {key} = ?" for key in values)
        changed = self._db.execute(
            f"UPDATE visits SET state = ?{sets} WHERE visit = ? AND state = ?", (after, *values.values(), visit, before)
        ).rowcount
        if changed != 1:
            raise LedgerError(f"visit {visit} is not {before}, so it cannot become {after}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _get(self, key: str, default: str | None = None) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            if default is None:
                raise LedgerError(f"the ledger has no {key}; it is damaged")
            return default
        return str(row[0])

    def _set(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(value)))


def _tables(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Table -> its columns."""
    names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")]
    return {name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")] for name in names}


def _read_only(path: Path) -> str:
    """The ledger's address for a reader. Without a log beside it nobody writes, and SQLite need not make one."""
    log = path.with_name(f"{path.name}-wal")
    written = log.exists() and log.stat().st_size > 0
    return f"file:{quote(str(path.absolute()))}?mode=ro{'' if written else '&immutable=1'}"
