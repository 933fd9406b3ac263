"""The report's section on capability: how often the policy solves each task, by what its training visits came to.

Owns: that section. Invariants: figures are the ledger's rows as written, for every sampler, uniform too; a task that
was never scored has none. Called by: `report`.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from springtide.ledger import Ledger, LedgerError, Outcome
from springtide.observe import charts
from springtide.observe.charts import Line
from springtide.observe.markup import Html, tag, wide_table
from springtide.observe.plots import smooth, window
from springtide.observe.runview import RunView
from springtide.rundir import RunDirectory

_BINS = 10
_LISTED = 8  # tasks a suite, at either end
_MOST = 400  # points a curve


def section(run: RunView) -> list[Any]:
    """The section's content; a sentence where there is nothing to show."""
    outcomes = _read(run)
    if isinstance(outcomes, str):
        return [tag("p", outcomes, class_="lead")]
    if not outcomes:
        return [tag("p", "No group has been played to its end yet.", class_="lead")]
    by_suite: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_suite[outcome.suite].append(outcome)
    kind = run.config["rollout"].get("sampling", {}).get("kind", "uniform")
    lead = (
        f"Sampler: {kind} (docs/sampling.md). A task's capability is the moving mean of its groups' success in "
        "training, environment errors aside. A group is mixed if some of its members won and some did not."
    )
    return [
        tag("p", lead, class_="lead"),
        wide_table(_rows(by_suite)),
        tag("div", _mixed_chart(run, by_suite), class_="grid2"),
        [_extremes(suite, _newest(rows)) for suite, rows in sorted(by_suite.items())],
    ]


def _read(run: RunView) -> list[Outcome] | str:
    path = RunDirectory(run.path).ledger
    if not path.is_file():
        return "The run has no ledger yet."
    try:
        ledger = Ledger(path, read_only=True)
        try:
            return ledger.outcomes()
        finally:
            ledger.close()
    except (LedgerError, sqlite3.Error) as error:
        return f"The ledger cannot be read: {error}."


def _rows(by_suite: dict[str, list[Outcome]]) -> list[Html]:
    edges = ["0", *(f"{i / _BINS:.1f}" for i in range(1, _BINS))]
    bands = [f"{edge} to {(i + 1) / _BINS:.1f}" for i, edge in enumerate(edges)]
    heads = ["suite", "tasks played", "groups", "mixed", "mean capability", *bands]
    rows = [tag("tr", [tag("th", h) for h in heads])]
    for suite, outcomes in sorted(by_suite.items()):
        newest = _newest(outcomes)
        bins = [0] * _BINS
        for outcome in newest:
            bins[min(_BINS - 1, int(outcome.p * _BINS))] += 1
        cells = [
            f"{len(newest):,}",
            f"{len(outcomes):,}",
            f"{fmean(map(mixed, outcomes)):.1%}",
            f"{fmean(o.p for o in newest):.2f}",
            *map(str, bins),
        ]
        rows.append(tag("tr", tag("td", tag("b", suite)), [tag("td", cell, class_="num") for cell in cells]))
    return rows


def _mixed_chart(run: RunView, by_suite: dict[str, list[Outcome]]) -> list[Html]:
    """Share of mixed groups and mean success of what was drawn, over the visits of each suite."""
    charted: dict[str, list[Line]] = {"Mixed groups": [], "Success of what was drawn": []}
    for suite, outcomes in sorted(by_suite.items()):
        color = run.colors.get(suite, "#4459c9")
        every = -(-len(outcomes) // _MOST)
        parts = [outcomes[i : i + every] for i in range(0, len(outcomes), every)]
        xs = [float(i * every + len(part)) for i, part in enumerate(parts)]
        width = max(window(len(parts)), len(parts) // 12)
        shares = [fmean(map(mixed, part)) for part in parts], [fmean(o.wins / o.played for o in p) for p in parts]
        for lines, ys in zip(charted.values(), shares, strict=True):
            lines.append(Line(suite, color, xs, smooth(ys, width), None))
    return [charts.line_chart(title, lines, unit="%", x_label="groups played") for title, lines in charted.items()]


def _extremes(suite: str, newest: Sequence[Outcome]) -> list[Html]:
    """The tasks it solves least and most."""
    ordered = sorted(newest, key=lambda o: (o.p, o.task))
    shown = ordered if len(ordered) <= 2 * _LISTED else [*ordered[:_LISTED], *ordered[-_LISTED:]]
    rows = [
        tag("tr", tag("td", o.task), tag("td", f"{o.p:.2f}", class_="num"), tag("td", f"{o.wins} of {o.played}"))
        for o in shown
    ]
    head = tag("tr", tag("th", "task"), tag("th", "capability"), tag("th", "won at its last visit"))
    return [tag("h3", f"{suite}: hardest and easiest of {len(newest):,} tasks played"), wide_table([head, *rows])]


def _newest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each task's last outcome."""
    return list({o.task: o for o in outcomes}.values())


def mixed(outcome: Outcome) -> bool:
    """Whether some of the group's members won and some did not."""
    return 0 < outcome.wins < outcome.played
