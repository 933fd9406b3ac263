"""The judge: a committed statement is right if it answers as gold does on the original and on both perturbed copies.

Owns: the comparison of answers and of states. Invariants: answers are compared on pristine copies; writes are replayed
in order on each copy, and every table that gold or the policy wrote to must end as gold leaves it, so a question that
asks for no change is failed by one.
Called by: `environment`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from springtide.suites.db.copies import COPIES
from springtide.suites.db.guard import Caps, GuardedConnection, SqlError
from springtide.suites.db.question import MAX_ANSWER_ROWS, Question, Rows

_STATE_ROWS = 100_000  # more than any table has


def judge(question: Question, committed: str, writes: Sequence[str], caps: Caps) -> list[tuple[bool, str]]:
    """Whether each copy comes out right, and what was seen there. `writes`: earlier statements that changed something.

    Stops at the first copy that is wrong: the others cannot mend it.
    """
    seen: list[tuple[bool, str]] = []
    for copy in range(COPIES):
        seen.append(_judge_copy(question, committed, writes, caps, copy))
        if not seen[-1][0]:
            break
    return seen


def _judge_copy(question: Question, committed: str, writes: Sequence[str], caps: Caps, copy: int) -> tuple[bool, str]:
    ours = GuardedConnection(question.copies.open(copy), caps)
    try:
        if question.writes:
            return _judge_state(question, (*writes, committed), ours, copy, question.answer)
        # Gold reads only, so both answers may come from one pristine copy.
        expected = ours.run(question.answer, MAX_ANSWER_ROWS).rows
        try:
            result = ours.run(committed, MAX_ANSWER_ROWS)
        except SqlError as error:
            return False, str(error)
        if result.cut or not same_answer(result.rows, expected, question.ordered):
            return False, f"{len(result.rows)} rows, {str(result.rows[:3])[:120]}, not {str(expected[:3])[:120]}"
        if writes or ours.touched:
            return _judge_state(question, writes, ours, copy, None)
        return True, ""
    finally:
        ours.close()


def _judge_state(
    question: Question, writes: Sequence[str], ours: GuardedConnection, copy: int, gold_write: str | None
) -> tuple[bool, str]:
    """Replay the policy's writes; every table that either wrote to must be as gold leaves it."""
    gold = GuardedConnection(question.copies.open(copy), Caps())
    try:
        if gold_write is not None:
            gold.run(gold_write, MAX_ANSWER_ROWS)
        for sql in writes:
            _attempt(ours, sql)
        return _same_state(ours, gold)
    finally:
        gold.close()


def _attempt(connection: GuardedConnection, sql: str) -> None:
    try:
        connection.run(sql, MAX_ANSWER_ROWS)
    except SqlError:
        return  # what fails on a copy changes nothing there; the state shows it


def _same_state(ours: GuardedConnection, gold: GuardedConnection) -> tuple[bool, str]:
    for table in sorted(ours.touched | gold.touched):
        sql = f'SELECT * FROM "{table}"'
        if not same_answer(_all(ours, sql), _all(gold, sql), ordered=False):
            return False, f"table {table} differs"
    return True, ""


def _all(connection: GuardedConnection, sql: str) -> Rows:
    return connection.run(sql, _STATE_ROWS).rows


def same_answer(given: Rows, expected: Rows, ordered: bool) -> bool:
    """Equal rows, as a sequence or as a multiset; whole numbers exactly, others within a relative 1e-9."""
    if len(given) != len(expected):
        return False
    if given == expected:
        return True
    if not ordered:
        given, expected = sorted(given, key=_row_key), sorted(expected, key=_row_key)
    return all(len(a) == len(b) and all(_same_value(x, y) for x, y in zip(a, b)) for a, b in zip(given, expected))


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)  # sums of floats differ by their order
    return type(a) is type(b) and a == b


def _row_key(row: tuple[Any, ...]) -> list[tuple[int, Any]]:
    return [
        (0, 0) if v is None else (1, round(v, 6)) if isinstance(v, int | float) else (2 if isinstance(v, str) else 3, v)
        for v in row
    ]
