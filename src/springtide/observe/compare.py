"""Two evaluations of the same tasks, compared task by task.

Owns: reading the episodes of an evaluation back, and the paired test. Invariants: only tasks that both sides played
count, and how many do is said; an episode whose environment failed is in neither; a task weighs the same however often
it was played. Pairing takes the tasks' difficulty out of the comparison: what is left is what the policies differ in,
and the noise of their own sampling.

The difference of a suite is the mean over tasks of (success of B - success of A), its interval the normal one of that
mean, its p-value that of a sign-flip test of the same mean (exact where few tasks differ, else over 20,000 seeded
flips): under the hypothesis that A and B are alike, a task's difference is as likely as its opposite (Fisher 1935;
Edgington). The mean over suites has the interval and the p-value of a sum of independent normal means.
Called by: `springtide compare`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from springtide.config import ConfigError
from springtide.rundir import RunDirectory

_EXACT = 14  # differing tasks whose sign flips are all tried
_FLIPS = 20_000
_Z = NormalDist().inv_cdf(0.975)

Scores = dict[tuple[str, str], dict[str, float]]  # (suite, how) -> task -> share of its episodes that succeeded


@dataclass(frozen=True, slots=True)
class Difference:
    """B against A on `tasks` shared tasks (`only_a`, `only_b` are left out). Success and differences in [-1, 1]."""

    suite: str
    how: str  # "sampled" or "greedy"
    tasks: int
    only_a: int
    only_b: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float


def read_scores(source: Path, label: str) -> Scores:
    """The evaluation `label` of a run directory, or a file of `springtide eval --out`. Raises: ConfigError."""
    if source.is_dir():
        file = RunDirectory(source).evaluation(label)
        if not file.exists():
            have = sorted(p.stem for p in file.parent.glob("*.jsonl"))
            raise ConfigError(
                f"{source} has no evaluation {label!r}; "
                + (f"it has {', '.join(have)}: choose one with --label" if have else "is it a run with evaluations?")
            )
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        try:
            rows = json.loads(source.read_text())["episodes"]
        except FileNotFoundError:
            raise ConfigError(f"there is no run and no file {source}") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{source} is no run directory and no file of springtide eval --out") from None
    found: defaultdict[tuple[str, str], defaultdict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["success"] is not None:
            how = "greedy" if row["temperature"] == 0 else "sampled"
            found[row["suite"], how][row["task"]].append(row["success"])
    return {key: {task: fmean(won) for task, won in tasks.items()} for key, tasks in found.items()}


def compare(a: Scores, b: Scores) -> list[Difference]:
    """One row a suite and way of sampling that both have, then their mean over suites. Raises: ConfigError."""
    rows: dict[str, list[Difference]] = {"sampled": [], "greedy": []}
    for suite, how in sorted(a.keys() & b.keys()):
        mine, theirs = a[suite, how], b[suite, how]
        shared = sorted(mine.keys() & theirs.keys())
        if shared:
            rows[how].append(_row(suite, how, mine, theirs, shared))
    if not any(rows.values()):
        raise ConfigError("the two evaluations share no task of any suite; evaluate both on the same suite and split")
    return [d for found in rows.values() if found for d in (*found, *([_mean(found)] if len(found) > 1 else []))]


def _row(suite: str, how: str, a: dict[str, float], b: dict[str, float], shared: Sequence[str]) -> Difference:
    d = np.array([b[task] - a[task] for task in shared])
    mean, error = float(d.mean()), _standard_error(d)
    return Difference(
        suite=suite,
        how=how,
        tasks=len(shared),
        only_a=len(a) - len(shared),
        only_b=len(b) - len(shared),
        a=fmean(a[task] for task in shared),
        b=fmean(b[task] for task in shared),
        difference=mean,
        low=mean - _Z * error,
        high=mean + _Z * error,
        p=sign_flip(d),
    )


def _mean(rows: Sequence[Difference]) -> Difference:
    mean = fmean(r.difference for r in rows)
    errors = [(r.high - r.difference) / _Z for r in rows]
    error = math.sqrt(sum(e * e for e in errors)) / len(rows)
    p = 2 * (1 - NormalDist().cdf(abs(mean) / error)) if error > 0 else float(mean == 0)
    return Difference(
        suite="mean",
        how=rows[0].how,
        tasks=sum(r.tasks for r in rows),
        only_a=sum(r.only_a for r in rows),
        only_b=sum(r.only_b for r in rows),
        a=fmean(r.a for r in rows),
        b=fmean(r.b for r in rows),
        difference=mean,
        low=mean - _Z * error,
        high=mean + _Z * error,
        p=p,
    )


def _standard_error(d: np.ndarray) -> float:
    return float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf


def sign_flip(differences: np.ndarray) -> float:
    """Two-sided p-value of the mean of paired differences [N] under random signs. 1 where none differs."""
    d = differences[differences != 0]
    if len(d) == 0:
        return 1.0
    if len(d) <= _EXACT:
        signs: Any = np.array(list(itertools.product((-1, 1), repeat=len(d))))
        return float((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean())
    rng = np.random.default_rng(0)
    signs = rng.choice((-1.0, 1.0), size=(_FLIPS, len(d)))
    # The order as it was found is one of the flips, so that p is never 0 (Phipson and Smyth 2010).
    return (1 + int((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).sum())) / (1 + _FLIPS)
