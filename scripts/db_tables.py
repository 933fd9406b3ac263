"""Write the tables of docs/db.md that say what the suite holds: databases, levels with their kinds of question.

    python scripts/db_tables.py

Owns: what stands between `<!-- generated: ... -->` and `<!-- end -->` there, but for the baselines, which
`python benchmarks/db.py` writes.
Called by: by hand after a change of the suite; tests/test_suite_db_deep.py checks that it was.
"""

from __future__ import annotations

import re
from pathlib import Path

from springtide.suites.db import SUITE
from springtide.suites.db.catalog import ABOUT, GROUPS, databases, read_rows
from springtide.suites.db.environment import CAPS, LIMITS, SIZES
from springtide.suites.db.recipes import groups, recipes

PAGE = Path(__file__).resolve().parents[1] / "docs/db.md"


def database_table() -> str:
    lines = ["| database | about | tables | columns | rows | asked from | side |", "|---|---|--:|--:|--:|---|---|"]
    for group, names in GROUPS.items():
        for name in names:
            tables = databases()[name].tables.values()
            columns, rows = sum(len(t.columns) for t in tables), sum(map(len, read_rows(name).values()))
            first = "hard" if group.startswith("deep") else "quick"
            side = "ood" if group.endswith("ood") else "train, test"
            lines.append(f"| `{name}` | {ABOUT[name][0]} | {len(tables)} | {columns} | {rows:,} | {first} | {side} |")
    return "\n".join(lines)


def level_table() -> str:
    lines = [
        "| level | kinds | of these only `ood` | databases train / ood | turns | characters of a reply | tasks |",
        "|---|--:|--:|---|--:|--:|---|",
    ]
    sizes = " / ".join(f"{SIZES[split]:,}" for split in ("train", "test", "ood"))
    for level in SUITE.levels:
        train, ood = recipes(level, "train"), recipes(level, "ood")
        wide = " / ".join(str(len(groups(level, split))) for split in ("train", "ood"))
        lines.append(
            f"| `{level}` | {len(ood)} | {len(set(ood) - set(train))} | {wide} | {LIMITS[level].max_turns} |"
            f" {CAPS[level].characters:,} | {sizes} |"
        )
    return "\n".join(lines)


TABLES = {"databases": database_table, "levels": level_table}


def generate(text: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, table=table: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(generate(PAGE.read_text()))
