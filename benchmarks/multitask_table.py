"""What `multitask` says: rows, tables, and where it stands beside what AgentRL printed.

Owns: the comparisons and their statistics, from stored cells alone; nothing is run here. Invariants: only what is whole
is compared (all arms of a seed, both halves of a pair); every sentence about agreement follows from an interval.
Called by: `multitask`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from common import Json, Row, interval

from springtide.rollout.evaluate import pass_at_k

Cells = Mapping[str, Json]  # by name: "full-0", "only-db-2", "passk-seeds"
Counts = list[list[int]]  # a task: successes, episodes

KS = (1, 2, 4, 8, 16, 32)
ABLATED = {"nocross": "cross-policy sampling", "nonorm": "task normalisation"}
_AGAINST = {"best": "the better policy alone", "mixed": "half of the episodes from each"}
# One-sided 80% quantiles of Student's t by degrees of freedom; beyond the table the normal one is within 2%.
_T80 = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879, 0.876, 0.873, 0.870, 0.868, 0.866, 0.865)
# AgentRL (arXiv 2510.04206v1), Qwen2.5-14B on five tasks, points of mean success.
_TABLE_4 = {"multi": 67.7, "best specialists": 67.8, "specialists everywhere": fmean((42.3, 31.9, 38.8, 30.2, 37.8))}
_TABLE_6 = {"full": 65.0, "nocross": 60.7, "nonorm": 59.4}


# --- statistics -------------------------------------------------------------------------------------------------------


def detectable(differences: Sequence[float]) -> float | None:
    """The smallest true difference that a paired two-sided test at 5% would find in 80% of such experiments.

    (t(97.5%) + t(80%)) x sd / sqrt(n), with n - 1 degrees of freedom; None for fewer than two differences.
    """
    low, high = interval(differences)
    if low is None or high is None:
        return None
    n = len(differences)
    t80 = _T80[n - 2] if n - 2 < len(_T80) else 0.842
    return (high - low) / 2 + t80 * statistics.stdev(differences) / math.sqrt(n)


def alone(counts: Sequence[int], k: int) -> float | None:
    """pass@k of one policy on one task, from `[successes, episodes]`."""
    wins, played = counts
    return pass_at_k([True] * wins + [False] * (played - wins), k)


def mixed(first: Sequence[int], second: Sequence[int], k: int) -> float | None:
    """pass@k with half of the k episodes from each of two policies, unbiased; k = 1: from one of them by a coin."""
    if k == 1:
        ones = [alone(c, 1) for c in (first, second)]
        return None if None in ones else fmean(p for p in ones if p is not None)
    halves = [alone(c, k // 2) for c in (first, second)]
    return None if None in halves else 1.0 - math.prod(1.0 - p for p in halves if p is not None)


def pass_table(wins: Mapping[str, Mapping[str, Counts]]) -> dict[str, dict[int, list[float | None]]]:
    """Policy ("first", "second", "mixed", "cross") -> k -> pass@k a task, of all suites in one order."""
    flat = {arm: [c for suite in sorted(suites) for c in suites[suite]] for arm, suites in wins.items()}
    most = max(played for counts in flat.values() for _, played in counts)
    ks = [k for k in KS if k <= most]
    table = {arm: {k: [alone(c, k) for c in flat[arm]] for k in ks} for arm in ("first", "second", "cross")}
    table["mixed"] = {k: [mixed(a, b, k) for a, b in zip(flat["first"], flat["second"], strict=True)] for k in ks}
    return table


def _mean_known(values: Iterable[float | None]) -> float:
    known = [v for v in values if v is not None]
    return fmean(known) if known else math.nan


# --- what is compared -------------------------------------------------------------------------------------------------


def make_rows(cells: Cells) -> list[Row]:
    """One row a comparison that is whole. Nothing is required of any: the issue asks for the effects."""
    rows: list[Row] = []
    if seeds := whole_seeds(cells):
        suites = _suites(cells, f"multi-{seeds[0]}")
        ahead = "multi-task ahead of specialists, each on its own suite"
        rows += [
            _row(f"{ahead}: mean sampled success", [_against_own(cells, s, suites, "sampled") for s in seeds]),
            *(
                _row(f"{ahead}: {suite}", [_against_own(cells, s, [suite], "sampled") for s in seeds])
                for suite in suites
            ),
            _row(f"{ahead}: mean greedy success", [_against_own(cells, s, suites, "greedy") for s in seeds]),
            _row("multi-task: gain over the start, mean sampled", [_gain(cells, s) for s in seeds]),
            _row("specialists: gain over the start on their own suite", [_own_gain(cells, s) for s in seeds]),
            _row("specialists: change from the start on the other suites", [_transfer(cells, s) for s in seeds]),
            _row("specialists on all suites, ahead of multi-task", [_everywhere(cells, s) for s in seeds]),
        ]
    for arm, what in ABLATED.items():
        if pairs := paired_seeds(cells, arm):
            suites = _suites(cells, f"full-{pairs[0]}")
            ahead = f"full ahead of without {what}"
            by_suite = {s: _paired(cells, arm, pairs, [s], "sampled") for s in suites}
            sampled = _paired(cells, arm, pairs, suites, "sampled")
            rows += [
                _row(f"{ahead}: mean sampled success", sampled),
                *(_row(f"{ahead}: {suite}", values) for suite, values in by_suite.items()),
                _row(f"{ahead}: mean greedy success", _paired(cells, arm, pairs, suites, "greedy")),
                Row(f"{ahead}: detectable effect, 80% power", detectable(sampled), "points", seeds=len(pairs)),
            ]
    for pair, wins in _pairs(cells).items():
        table = pass_table(wins)
        rows += [
            _row(f"{pair}: pass@{k} of cross ahead of {said}", _cross_ahead(table, k, other), seeds=1)
            for other, said in _AGAINST.items()
            for k in (1, max(table["first"]))
        ]
    return rows


def _row(target: str, values: Sequence[float], seeds: int | None = None) -> Row:
    """values: one a seed; or one a task, then `seeds` is given, and the interval is over tasks."""
    low, high = interval(values)
    extra = {
        "detectable": detectable(values),
        "by_seed" if seeds is None else "tasks": values if seeds is None else len(values),
    }
    return Row(target, fmean(values), "points", seeds=seeds or len(values), ci_low=low, ci_high=high, extra=extra)


def whole_seeds(cells: Cells) -> list[int]:
    """Seeds whose start, multi-task policy and every specialist are there."""
    return [
        seed
        for seed in _seeds(cells, "multi")
        if f"start-{seed}" in cells and set(_specialists(cells, seed)) == set(_suites(cells, f"multi-{seed}"))
    ]


def paired_seeds(cells: Cells, arm: str) -> list[int]:
    return sorted(set(_seeds(cells, "full")) & set(_seeds(cells, arm)))


def _seeds(cells: Cells, arm: str) -> list[int]:
    return sorted(int(n.rpartition("-")[2]) for n in cells if n.rpartition("-")[0] == arm)


def _pairs(cells: Cells) -> dict[str, Mapping[str, Mapping[str, Counts]]]:
    """Pair -> what `pass_table` reads."""
    names = sorted(n for n in cells if n.startswith("passk-"))
    return {n.removeprefix("passk-"): cells[n]["result"]["wins"] for n in names}


def _suites(cells: Cells, name: str) -> list[str]:
    return sorted(cells[name]["result"]["end"])


def _specialists(cells: Cells, seed: int) -> dict[str, str]:
    """Suite -> the name of the cell of its specialist."""
    names = [n for n in cells if n.startswith("only-") and n.endswith(f"-{seed}")]
    return {suite: n for n in names for suite in cells[n]["result"]["groups"]}


def _success(cells: Cells, name: str, suites: Sequence[str], key: str = "sampled") -> float:
    """In points."""
    return 100 * fmean(cells[name]["result"]["end"][s][key] for s in suites)


def _against_own(cells: Cells, seed: int, suites: Sequence[str], key: str) -> float:
    own = _specialists(cells, seed)
    return fmean(_success(cells, f"multi-{seed}", [s], key) - _success(cells, own[s], [s], key) for s in suites)


def _gain(cells: Cells, seed: int) -> float:
    suites = _suites(cells, f"multi-{seed}")
    return _success(cells, f"multi-{seed}", suites) - _success(cells, f"start-{seed}", suites)


def _own_gain(cells: Cells, seed: int) -> float:
    own = _specialists(cells, seed)
    return fmean(_success(cells, name, [s]) - _success(cells, f"start-{seed}", [s]) for s, name in own.items())


def _transfer(cells: Cells, seed: int) -> float:
    """Zero where there is no other suite."""
    changes = [
        _success(cells, name, [other]) - _success(cells, f"start-{seed}", [other])
        for own, name in _specialists(cells, seed).items()
        for other in _suites(cells, name)
        if other != own
    ]
    return fmean(changes or [0.0])


def _everywhere(cells: Cells, seed: int) -> float:
    suites = _suites(cells, f"multi-{seed}")
    specialists = [_success(cells, name, suites) for name in _specialists(cells, seed).values()]
    return fmean(specialists) - _success(cells, f"multi-{seed}", suites)


def _paired(cells: Cells, arm: str, seeds: Sequence[int], suites: Sequence[str], key: str) -> list[float]:
    return [_success(cells, f"full-{s}", suites, key) - _success(cells, f"{arm}-{s}", suites, key) for s in seeds]


def _cross_ahead(table: Mapping[str, Mapping[int, list[float | None]]], k: int, other: str) -> list[float]:
    """A task's difference, in points; the better policy is the one of the higher mean pass@k."""
    if other == "best":
        other = max(("first", "second"), key=lambda arm: _mean_known(table[arm][k]))
    pairs = zip(table["cross"][k], table[other][k], strict=True)
    return [100 * (a - b) for a, b in pairs if a is not None and b is not None]


# --- in words ---------------------------------------------------------------------------------------------------------


def make_notes(cells: Cells, missing: Sequence[str] = ()) -> list[str]:
    lines = [
        "Intervals are over seeds (paired where arms are compared), those of pass@k over the tasks of one pair. "
        "`detectable effect` is the smallest true difference that a paired test at 5% finds in 80% of experiments "
        "like this, from the deviation met here.",
    ]
    if missing:
        lines += ["", f"Not run yet, and counted nowhere: {', '.join(missing)}."]
    lines += ["", *_published(cells), "", *_arms(cells)]
    for pair, wins in _pairs(cells).items():
        lines += ["", *_passes(pair, wins)]
    return lines


def agreement(published: float, values: Sequence[float]) -> str:
    """Where AgentRL's figure lies beside our interval."""
    low, high = interval(values)
    if low is None or high is None:
        return "one seed, so no interval"
    if low <= published <= high:
        return "told apart neither from AgentRL's nor from 0" if low <= 0 <= high else "agrees: inside our interval"
    if low <= 0 <= high:
        return "**disagrees**: our interval holds 0, and not AgentRL's"
    same = (low > 0) == (published > 0)
    return "same direction, another size" if same else "**disagrees**: the opposite direction"


def direction(published: int, values: Sequence[float]) -> str:
    """Of a figure that AgentRL only drew: `published` is 1 where it is above 0, else -1."""
    low, high = interval(values)
    if low is None or high is None or low <= 0 <= high:
        return "not told apart from 0"
    return "agrees" if (low > 0) == (published > 0) else "**disagrees**: the opposite direction"


def _published(cells: Cells) -> list[str]:
    """The table beside AgentRL's figures. Its models and tasks are others: only directions can be compared well."""
    lines = [
        "Beside AgentRL (arXiv 2510.04206v1; Qwen2.5-14B on five tasks, its ablations on one seed). Models, tasks and "
        "compute differ by orders of magnitude, so sizes need not agree.",
        "",
        "| question | AgentRL | here, points | agreement |",
        "|---|---|---|---|",
    ]

    def add(question: str, source: str, published: float, values: Sequence[float]) -> None:
        lines.append(f"| {question} | {published:+.1f} ({source}) | {_said(values)} | {agreement(published, values)} |")

    if seeds := whole_seeds(cells):
        suites = _suites(cells, f"multi-{seeds[0]}")
        add(
            "multi-task ahead of the best specialists, mean",
            "Table 4",
            _TABLE_4["multi"] - _TABLE_4["best specialists"],
            [_against_own(cells, s, suites, "sampled") for s in seeds],
        )
        add(
            "a specialist on all tasks, ahead of multi-task",
            "Table 4",
            _TABLE_4["specialists everywhere"] - _TABLE_4["multi"],
            [_everywhere(cells, s) for s in seeds],
        )
    for arm, what in ABLATED.items():
        if pairs := paired_seeds(cells, arm):
            values = _paired(cells, arm, pairs, _suites(cells, f"full-{pairs[0]}"), "sampled")
            add(f"what {what} is worth", "Table 6", _TABLE_6["full"] - _TABLE_6[arm], values)
    for pair, wins in _pairs(cells).items():
        table = pass_table(wins)
        claims: list[tuple[int, str, str, int]] = [
            (1, "best", "slightly below", -1),
            (max(table["cross"]), "best", "above", 1),
            (max(table["cross"]), "mixed", "above", 1),
        ]
        for k, other, said, sign in claims:
            values = _cross_ahead(table, k, other)
            lines.append(
                f"| {pair}: pass@{k} of cross against {_AGAINST[other]} | {said} (Fig. 8) "
                f"| {_said(values)} | {direction(sign, values)} |"
            )
    return lines


def _said(values: Sequence[float]) -> str:
    low, high = interval(values)
    between = f" ({low:+.1f} to {high:+.1f})" if low is not None else ""
    return f"{fmean(values):+.1f}{between}"


def _arms(cells: Cells) -> list[str]:
    """Every arm's means over its seeds: success by suite, sampled / greedy, and what it cost."""
    arms = sorted({n.rpartition("-")[0] for n in cells if not n.startswith("passk-")}, key=_order)
    if not arms:
        return []
    suites = _suites(cells, next(n for n in cells if not n.startswith("passk-")))
    head = ["arm", "seeds", *suites, "mean", "steps", "loss tokens", "trained, min"]
    lines = ["Sampled / greedy success at the end, %, and what it took, means over seeds.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for arm in arms:
        names = [f"{arm}-{seed}" for seed in _seeds(cells, arm)]

        def mean(read: Callable[[str], float], names: list[str] = names) -> float:
            return fmean(read(n) for n in names)

        shown = [
            " / ".join(f"{mean(lambda n, g=g, k=key: _success(cells, n, g, k)):.1f}" for key in ("sampled", "greedy"))
            for g in (*([s] for s in suites), suites)
        ]
        cost = ["-"] * 3
        if "steps" in cells[names[0]]["result"]:
            cost = [
                f"{mean(lambda n: cells[n]['result']['steps']):.0f}",
                f"{mean(lambda n: cells[n]['result']['loss_tokens']):,.0f}",
                f"{mean(lambda n: cells[n]['result']['train_s']) / 60:.1f}",
            ]
        lines.append(f"| {' | '.join([arm, str(len(names)), *shown, *cost])} |")
    return lines


def _order(arm: str) -> tuple[int, str]:
    known = ("start", "full", "nocross", "nonorm", "multi")
    return (known.index(arm) if arm in known else len(known), arm)


def _passes(pair: str, wins: Mapping[str, Mapping[str, Counts]]) -> list[str]:
    """pass@k of a pair, %, over all suites and in each."""
    suites = sorted(wins["cross"])
    ks = list(pass_table(wins)["cross"])
    lines = [f"pass@k, %, of the pair {pair}.", "", f"| suite | episodes from | {' | '.join(f'k = {k}' for k in ks)} |"]
    lines.append(f"|{'---|' * (len(ks) + 2)}")
    names = {
        "first": "the first alone",
        "second": "the second alone",
        "mixed": "half from each",
        "cross": "cross, by turn",
    }
    for label, group in (("all", suites), *((s, [s]) for s in suites)):
        table = pass_table({arm: {s: by_suite[s] for s in group} for arm, by_suite in wins.items()})
        for arm, said in names.items():
            lines.append(f"| {label} | {said} | {' | '.join(f'{100 * _mean_known(table[arm][k]):.1f}' for k in ks)} |")
    return lines
