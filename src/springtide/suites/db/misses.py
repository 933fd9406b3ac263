"""Near misses of a gold statement: a condition dropped, a count moved by one, a comparison, aggregate or order swapped.

A question of the deeper levels is asked only if each of them is wrong: a clause that makes no difference on any copy
could be left out unseen, and the verifier would not be exact. Conditions on NULL are not dropped: aggregates and
comparisons pass over NULL anyway.
Called by: `environment.find_draw`, when the suite's data is built.
"""

from __future__ import annotations

import re
import sqlite3

from springtide.suites.db.copies import COPIES
from springtide.suites.db.judge import same_answer
from springtide.suites.db.question import MAX_ANSWER_ROWS, Question, Rows, limit, written_table

_TEXT = r"'(?:[^']|'')*'"
_COLUMN = r"(?:strftime\('[^']*', [\w.]+\)|COUNT\(\*\)|AVG\([\w.]+\)|[\w.]+)"
# What is put in the place of what; a condition that is dropped becomes one that always holds.
_RULES: tuple[tuple[str, str], ...] = (
    (rf"(?<!CASE WHEN )(?<!, )(?<!SET ){_COLUMN} BETWEEN {_TEXT} AND {_TEXT}", "1"),
    (rf"(?<=WHERE ){_COLUMN} (?:=|<>|>|<|>=) (?:{_TEXT}|-?\d[\d.]*)(?![\d.])", "1"),
    (rf"(?<=AND ){_COLUMN} (?:=|<>|>|<|>=) (?:{_TEXT}|-?\d[\d.]*)(?![\d.])", "1"),
    (rf"(?<=HAVING ){_COLUMN} (?:=|<>|>|<|>=) (?:{_TEXT}|-?\d[\d.]*)(?![\d.])", "1"),
    (r"(?<=COUNT\(\*\)) >= (?=\d)", " > "),
    (r" > ", " < "),
    (r" < ", " > "),
    (r"\bAVG\(", "MAX("),
    (r"\bSUM\((?!CASE)", "AVG("),
    (r"\bMAX\(", "MIN("),
    (r"\bMIN\(", "MAX("),
    (r" DESC\b", " ASC"),
    (r" ASC\b", " DESC"),
    (r" INTERSECT ", " UNION "),
    (r" EXCEPT ", " UNION "),
    (r" NOT IN ", " IN "),
    (r" OFFSET \d+", ""),
    (r"\bCOUNT\(DISTINCT ", "COUNT("),
)


def near_misses(sql: str) -> list[str]:
    """Every statement that one rule makes of this one at one place outside its texts."""
    texts = [match.span() for match in re.finditer(_TEXT, sql)]
    found = []
    for pattern, instead in _RULES:
        for match in re.finditer(pattern, sql):
            if not any(start < match.start() < end for start, end in texts):
                found.append(sql[: match.start()] + instead + sql[match.end() :])
    return found


def all_wrong(question: Question, budget: int) -> bool:
    """Whether every near miss differs from gold on some copy. One that fails, or takes more than `budget`, differs."""
    left = near_misses(question.answer)
    for copy in range(COPIES):
        connection = question.copies.open(copy)
        try:
            gold = _outcome(connection, question, question.answer, budget)
            left = [sql for sql in left if _same(_outcome(connection, question, sql, budget), gold, question)]
        finally:
            connection.close()
    return not left


def _outcome(connection: sqlite3.Connection, question: Question, sql: str, budget: int) -> Rows | None:
    """The rows of an answer, or of the table that a change leaves (and undoes); None if the statement fails."""
    limit(connection, budget)
    try:
        if not question.writes:
            return connection.execute(sql).fetchmany(MAX_ANSWER_ROWS + 1)
        connection.execute("BEGIN")
        try:
            connection.execute(sql)
            return connection.execute(f"SELECT * FROM {written_table(question.answer)}").fetchall()
        finally:
            connection.set_progress_handler(None, 0)
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return None


def _same(rows: Rows | None, gold: Rows | None, question: Question) -> bool:
    return rows is not None and gold is not None and same_answer(rows, gold, question.ordered)
