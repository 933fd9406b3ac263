"""What the benchmarks of the suites share: how often a policy without a model succeeds, as a row and on a page.

Owns: the row's figures, and what stands between `<!-- generated: baselines -->` and `<!-- end -->` of a suite's page.
Invariant: the table is made from a result alone, so that a test can hold a page to what is stored.
Called by: `db`, `kg`, `household`.
"""

from __future__ import annotations

from pathlib import Path

from common import REPO, Json, Row

from springtide.rollout.evaluate import wilson

_OPENS, _CLOSES = "<!-- generated: baselines -->\n", "<!-- end -->"


def success_row(target: str, won: int, episodes: int, tasks: int, *, most: float | None) -> Row:
    """Percent of successes with Wilson's interval. target: "LEVEL: policy". most: what is allowed; None: anything."""
    low, high = wilson(won, episodes)
    return Row(
        target,
        100 * won / episodes,
        "%",
        required=most,
        at_most=True,
        ci_low=100 * low,
        ci_high=100 * high,
        extra={"episodes": episodes, "tasks": tasks, "won": won},
    )


def page(suite: str) -> Path:
    return REPO / "docs" / f"{suite}.md"


def policy_table(result: Json) -> str:
    """A row a level, a column a policy: percent with its interval; what is no share of successes, its mean."""
    found: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        level, _, policy = row["target"].partition(": ")
        between = f" ({row['ci_low']:.1f} to {row['ci_high']:.1f})" if row["unit"] == "%" else ""
        found.setdefault(level, {})[policy] = f"{row['value']:.1f}{between}"
    head = ["level", *next(iter(found.values()))]
    body = [[f"`{level}`", *cells.values()] for level, cells in found.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))


def write_page(result: Json) -> None:
    """Put the table into the suite's page; a quick result is never written."""
    if result["quick"]:
        return
    path = page(result["name"])
    before, _, rest = path.read_text().partition(_OPENS)
    path.write_text(f"{before}{_OPENS}{policy_table(result)}{_CLOSES}{rest.partition(_CLOSES)[2]}")
