"""`DatabaseTasks`: questions about, and changes to, an SQLite database whose schema the policy must find out.

Owns: one episode. Invariants: the task is made from its seed and its recipe alone; the policy works on the original,
never on the copies it is judged by; what it writes is replayed there; every statement, the judge's too, runs in a
thread (all methods are plain `def`), so a slow one delays no other episode of the worker.
Called by: environment workers, through `SUITE`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from springtide.env import Check, Environment, Limits, Outcome, Requires, Task, TaskList, ToolError, tool
from springtide.suites.db import deep, quick, recipes, standard
from springtide.suites.db.catalog import Side
from springtide.suites.db.guard import Caps, GuardedConnection, SqlError
from springtide.suites.db.judge import judge
from springtide.suites.db.library import Library
from springtide.suites.db.misses import all_wrong
from springtide.suites.db.pen import NothingToName
from springtide.suites.db.question import Question, is_fair

SIZES = {"train": 1500, "test": 400, "ood": 400}
LIMITS = {
    "quick": Limits(max_turns=6, act_s=10.0),
    "standard": Limits(max_turns=15, act_s=10.0),
    "hard": Limits(max_turns=20, act_s=10.0),
    "expert": Limits(max_turns=25, act_s=10.0),
}
CAPS = {
    "quick": Caps(200_000, rows=8, characters=120),
    "standard": Caps(2_000_000, rows=40, characters=800),
    "hard": Caps(4_000_000, rows=40, characters=1_000),
    "expert": Caps(4_000_000, rows=40, characters=1_500),
}
_MAKERS = {"quick": quick.make, "standard": standard.make, "hard": deep.make_hard, "expert": deep.make_expert}
_SAME_RECIPE, _MOST_DRAWS = 12, 600  # draws before another recipe of the kind is tried, and in all
_PREFACE = (
    "You work on an SQLite database that you have not seen. Find out its tables and columns with execute_sql. Then call"
    " commit_final_answer with the one SQL statement whose result is the answer, or that makes the change.\n\n"
)


def draw_question(level: str, split: str, seed: int, draw: int, library: Library) -> Question | None:
    """One draw of the question of the task with this seed; None if there was nothing to ask about.

    The seed fixes the kind; after a few draws another recipe of the kind has its turn.
    """
    kind = recipes.draw_kind(level, split, random.Random(seed))
    recipe = recipes.draw_recipe(level, split, kind, random.Random(seed + 1 + draw // _SAME_RECIPE))
    side: Side = split  # type: ignore[assignment]  # the splits are the sides
    try:
        return _MAKERS[level](recipe, side, library, random.Random(seed * 4096 + draw))
    except NothingToName:
        return None


def find_draw(level: str, split: str, seed: int, library: Library) -> int:
    """The first fair draw of a task: what `data/draws.json` holds. Raises: RuntimeError if there is none."""
    for draw in range(_MOST_DRAWS):
        question = draw_question(level, split, seed, draw, library)
        if question is not None and _is_fair(question, level):
            return draw
    raise RuntimeError(f"no fair question for the task with seed {seed} ({level}/{split}) in {_MOST_DRAWS} draws")


def _is_fair(question: Question, level: str) -> bool:
    if level not in recipes.DEEP:
        return is_fair(question, all_differ=level == "quick")
    # Statements may be long here: all that gold runs takes less than one statement of a policy may.
    budget = CAPS[level].instructions
    return is_fair(question, all_differ=False, budget=budget) and all_wrong(question, budget)


def make_question(task: Task, library: Library) -> Question:
    """The question of a task. Raises: RuntimeError if data/draws.json does not fit the code."""
    return _make_question(library, task.id, task.level, task.split, task.index, task.seed)


@functools.lru_cache(64)  # a group's members start one after another, with one question
def _make_question(library: Library, name: str, level: str, split: str, index: int, seed: int) -> Question:
    question = draw_question(level, split, seed, library.draws(level, split)[index], library)
    if question is None:
        raise RuntimeError(f"{name}: data/draws.json is out of date; run scripts/build_db_data.py")
    return question


class DatabaseTasks(Environment):
    """One question about one database."""

    name: ClassVar[str] = "db"
    version: ClassVar[str] = "1"
    levels: ClassVar[tuple[str, ...]] = ("quick", "standard", "hard", "expert")
    max_turns: ClassVar[int] = 15
    requires: ClassVar[Requires] = Requires(memory_mb=80)

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        """1,500 train, 400 test and 400 ood tasks a level."""

        def make(index: int) -> Task:
            return cls.make_task(split, level, index, {}, limits=LIMITS[level])

        return TaskList(SIZES[split], make)

    @classmethod
    @asynccontextmanager
    async def shared(cls) -> AsyncIterator[Library]:  # type: ignore[override]
        """The databases of a worker process."""
        yield Library()

    def start(self) -> str:  # type: ignore[override]  # see the module: all of it runs in threads
        """Open the database; the instruction tells nothing of its schema."""
        task = self.task
        self._database: GuardedConnection | None = None
        library: Library = self.shared  # type: ignore[assignment]  # on an instance, what the class's `shared` yields
        self._question = make_question(task, library)
        self._caps = CAPS[task.level]
        self._writes: list[str] = []
        self._committed: str | None = None
        self._database = GuardedConnection(self._question.copies.open(0), self._caps)
        return self._question.text if task.level == "quick" else _PREFACE + self._question.text

    @tool
    def execute_sql(self, sql: str) -> str:
        """Run one SQL statement on the database and see its result.

        sql: one SQLite statement; PRAGMA table_list lists tables, PRAGMA table_info(t) lists columns
        """
        return self._run(sql)

    @tool(final=True)
    def commit_final_answer(self, sql: str) -> str:
        """Submit the SQL statement whose result is the answer, or that makes the change. Ends the task.

        sql: one SQLite statement; it is also run on databases with other values, so it must not be a constant
        """
        self._run(sql, commit=True)
        self._committed = sql
        return "ok"

    def _run(self, sql: str, commit: bool = False) -> str:
        database = self._database
        assert database is not None
        before = set(database.touched)
        database.touched.clear()
        try:
            text = database.show(sql)
        except SqlError as error:
            raise ToolError(str(error)) from None
        finally:
            if database.touched and not commit:
                self._writes.append(sql)
            database.touched |= before
        return text

    def score(self) -> Outcome:  # type: ignore[override]
        """1 if gold and the committed statement agree on all three copies, else 0."""
        if self._committed is None:
            check = Check("committed", 0.0, evidence="no statement was committed")
            return Outcome("completed", 0.0, False, (check,))
        seen = judge(self._question, self._committed, self._writes, self._caps)
        checks = tuple(Check(f"copy {k}", float(right), evidence=why) for k, (right, why) in enumerate(seen))
        success = all(right for right, _ in seen)
        return Outcome("completed", float(success), success, checks)

    def gold(self) -> list[tuple[str, dict[str, Any]]]:  # type: ignore[override]
        """List the tables, list the columns of those needed, look up what is needed, commit."""
        calls = [("execute_sql", {"sql": sql}) for sql in self._question.lookups]
        return [*calls, ("commit_final_answer", {"sql": self._question.answer})]

    def close(self) -> None:  # type: ignore[override]
        """Ends a statement that still runs: an episode may be closed in the middle of one."""
        database = getattr(self, "_database", None)
        if database is not None:
            database.close()
