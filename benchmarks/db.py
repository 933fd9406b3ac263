"""What policies that cannot do the tasks of `db` reach at each of its levels.

Baselines, each without a model, on tasks of `test` and of `ood`:
  nothing     commits a statement that reads nothing and changes nothing
  statement   commits the commonest gold statement of the training tasks
  constant    commits the commonest answer of the training tasks as a constant
  first row   looks at the tables gold needs and commits the first value it finds there
  count       counts the rows of a table that gold needs
  prompt      commits what the prompt says between quotes
  random      looks at tables at random and commits a valid statement made of what it saw and of the prompt's values
  informed    as `random`, but knows which tables gold needs, how they join, and whether something is to be changed
A success is the suite's own: agreement with gold on the original and on both changed copies.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

from baselines import success_row, write_page
from common import Load, Row, arguments, emit, report

from springtide.suites.db import SUITE
from springtide.suites.db.environment import CAPS, make_question
from springtide.suites.db.guard import GuardedConnection, SqlError
from springtide.suites.db.judge import judge
from springtide.suites.db.library import Library
from springtide.suites.db.question import Question, literal

Policy = Callable[[Question, str, random.Random], str]
MOST = 10.0  # percent
_TRAINED_ON = 300  # training tasks from which the commonest statement and answer are taken


def succeeds(question: Question, level: str, statement: str) -> bool:
    return all(right for right, _ in judge(question, statement, (), CAPS[level]))


def nothing(question: Question, level: str, rng: random.Random) -> str:
    return "SELECT 1"


def prompt(question: Question, level: str, rng: random.Random) -> str:
    said = _said(question)
    return f"SELECT {rng.choice(said)}" if said else "SELECT 1"


def _needed(question: Question) -> list[str]:
    return [sql.split("(")[1].rstrip(")") for sql in question.lookups if sql.startswith("PRAGMA table_info")]


def _said(question: Question) -> list[str]:
    """The values of the prompt, as literals."""
    return re.findall(r"'[^']*'|\b\d[\d.-]*\d\b|\b\d\b", question.text)


def first_row(question: Question, level: str, rng: random.Random) -> str:
    seen = _look(question, level, _needed(question))
    table = rng.choice(list(seen))
    return f"SELECT {rng.choice(seen[table])} FROM {table} LIMIT 1"


def count(question: Question, level: str, rng: random.Random) -> str:
    return f"SELECT COUNT(*) FROM {rng.choice(_needed(question))}"


def _look(question: Question, level: str, tables: Sequence[str] | None, most: int = 3) -> dict[str, list[str]]:
    """Columns by table, of `tables` or of up to `most` at random, as a policy finds them."""
    guarded = GuardedConnection(question.copies.open(0), CAPS[level])
    try:
        if tables is None:
            listed = guarded.show("PRAGMA table_list").removesuffix(" ...").split()
            tables = random.Random(question.text).sample(listed, min(most, len(listed)))
        return {table: guarded.show(f"PRAGMA table_info({table})").removesuffix(" ...").split() for table in tables}
    finally:
        guarded.close()


def uninformed(question: Question, level: str, rng: random.Random) -> str:
    """A valid statement of gold's forms over random tables."""
    seen = _look(question, level, None)
    tables = rng.sample(list(seen), rng.randint(1, min(2, len(seen))))
    source = tables[0]
    if len(tables) == 2:
        one, other = (rng.choice(seen[table]) for table in tables)
        source = f"{tables[0]} JOIN {tables[1]} ON {tables[0]}.{one} = {tables[1]}.{other}"
    changes = rng.random() < 0.25
    return _draw(seen, tables, source, _said(question) or ["1"], changes, rng)


def informed(question: Question, level: str, rng: random.Random) -> str:
    """The same over gold's tables and gold's joins."""
    tables = _needed(question)
    seen = _look(question, level, tables)
    joined = re.search(r"FROM (\w+(?: JOIN \w+ ON [\w.]+ = [\w.]+)+)", question.answer)
    source = joined[1] if joined else tables[0]
    used = [table for table in tables if re.search(rf"\b{table}\b", source)] or tables[:1]
    return _draw(seen, used, source, _said(question) or ["1"], question.writes, rng)


def _draw(
    seen: dict[str, list[str]], tables: list[str], source: str, said: list[str], changes: bool, rng: random.Random
) -> str:
    def column() -> str:
        table = rng.choice(tables)
        return f"{table}.{rng.choice(seen[table])}"

    a, b, c = column(), column(), column()
    value, sign, way = rng.choice(said), rng.choice("<>="), rng.choice(("", "DESC"))
    where = f"{b} {sign} {value}"
    if rng.random() < 0.4:
        where += f" AND {c} {rng.choice('<>=')} {rng.choice(said)}"
    if changes:
        table = tables[0]
        own, on = (rng.choice(seen[table]) for _ in range(2))
        given = rng.choice((rng.choice(said), f"{own} + {rng.choice(said)}"))
        return rng.choice(
            (
                f"UPDATE {table} SET {own} = {given} WHERE {on} {sign} {value}",
                f"DELETE FROM {table} WHERE {on} {sign} {value}",
                f"INSERT INTO {table} ({own}) VALUES ({value})",
            )
        )
    what = rng.choice(("COUNT(*)", f"SUM({a})", f"AVG({a})", f"MAX({a})", f"MIN({a})", f"COUNT(DISTINCT {a})"))
    return rng.choice(
        (
            f"SELECT {what} FROM {source} WHERE {where}",
            f"SELECT {a} FROM {source} WHERE {where}",
            f"SELECT {a} FROM {source} WHERE {where} ORDER BY {c} {way} LIMIT 1",
            f"SELECT {a} FROM {source} ORDER BY {b} {way} LIMIT {rng.randint(1, 3)}",
            f"SELECT {a} FROM {source} GROUP BY {b} ORDER BY {what} {way} LIMIT 1",
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {source} WHERE {where} GROUP BY {c})",
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {source} GROUP BY {b} HAVING {what} {sign} {value})",
            f"SELECT {what} FROM {source} WHERE {b} {sign} (SELECT AVG({b}) FROM {source})",
        )
    )


def learned(level: str, library: Library) -> dict[str, Policy]:
    """The policies that repeat what is commonest in training."""
    statements: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for task in SUITE.tasks("train", level)[:_TRAINED_ON]:
        question = make_question(task, library)
        statements[question.answer] += 1
        if not question.writes:
            guarded = GuardedConnection(question.copies.open(0), CAPS[level])
            rows = guarded.run(question.answer, 1).rows
            answers["VALUES " + ", ".join("(" + ", ".join(map(literal, row)) + ")" for row in rows)] += 1
            guarded.close()
    statement, answer = statements.most_common(1)[0][0], answers.most_common(1)[0][0]
    return {"statement": lambda q, level, rng: statement, "constant": lambda q, level, rng: answer}


# By name: the policy, and how often it plays a task.
UNTRAINED: dict[str, tuple[Policy, int]] = {
    "nothing": (nothing, 1),
    "first row": (first_row, 2),
    "count": (count, 2),
    "prompt": (prompt, 2),
    "random": (uninformed, 5),
    "informed": (informed, 5),
}


def measure(
    level: str, split: str, policies: dict[str, tuple[Policy, int]], tasks: int, library: Library
) -> dict[str, tuple[int, int]]:
    """(successes, episodes) by policy, over tasks spread evenly over the split."""
    every = SUITE.tasks(split, level)
    won = dict.fromkeys(policies, 0)
    chosen = every[:: max(1, len(every) // tasks)][:tasks]
    for task in chosen:
        question = make_question(task, library)
        for name, (policy, times) in policies.items():
            for turn in range(times):
                try:
                    won[name] += succeeds(question, level, policy(question, level, random.Random(f"{task.id}/{turn}")))
                except SqlError:
                    continue  # a statement that the judge cannot even read is no answer
    return {name: (won[name], len(chosen) * times) for name, (_, times) in policies.items()}


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows: list[Row] = []
    tasks, library = (40 if options.quick else 400), Library()
    with Load() as load:
        for level in SUITE.levels:
            policies = UNTRAINED | {name: (policy, 1) for name, policy in learned(level, library).items()}
            for split in ("test", "ood"):
                for name, (won, episodes) in measure(level, split, policies, tasks, library).items():
                    rows.append(success_row(f"{level} {split}: {name}", won, episodes, tasks, most=MOST))
    note = "400 tasks of each split; `random` and `informed` play each five times; intervals are Wilson's."
    result = report("db", rows, load, quick=options.quick, notes=[note])
    emit(result, as_json=options.json)
    write_page(result)


if __name__ == "__main__":
    main()
