"""Evaluation: fixed tasks, a pinned policy, and figures with their intervals.

Owns: how tasks for evaluation are chosen (the first of a split, or the dev tenth of `train`), how often each is played,
and what is reported: mean success with a Wilson interval, pass@k, rates per status. An episode whose environment
failed is counted and left out of every rate; it is never a failure of the policy.
Called by: the driver during training, and `springtide eval`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from springtide.process import task_group
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.trace import TaskRef

Play = Callable[[EpisodeSpec], Awaitable[EpisodeSummary]]
_RETRIES = 2  # for an episode whose environment failed
_ATTEMPTS = 12  # in all: one that is lost to a killed process uses up no retry, but may be what kills it


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """One suite at one temperature. Rates are shares of episodes whose environment did not fail."""

    suite: str
    episodes: int
    success: float
    low: float
    high: float
    reward: float
    pass_at: dict[int, float]
    status: dict[str, float]
    env_errors: int
    tokens: float
    turns: float
    generated: int  # tokens of all attempts, those whose environment failed included
    first_error: str = ""  # of the episodes whose environment failed: "cause: what it said"


@dataclass(frozen=True, slots=True)
class EvalEpisode:
    """One evaluated episode, as it is written for others to read. success: None where its environment failed."""

    suite: str
    task: str
    sample: int
    temperature: float
    status: str
    success: bool | None
    reward: float | None
    turns: int
    tokens: int
    cause: str | None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Suite -> result, and the mean over suites (each suite weighs the same)."""

    suites: dict[str, SuiteResult] = field(default_factory=dict)
    episodes: tuple[EvalEpisode, ...] = ()

    @property
    def success(self) -> float:
        return sum(s.success for s in self.suites.values()) / len(self.suites) if self.suites else math.nan


def eval_tasks(catalog: Sequence[TaskRef], count: int, *, dev: bool) -> list[TaskRef]:
    """The first `count` tasks of a split, or of its dev tenth: always the same ones, so that runs compare."""
    chosen = [t for t in catalog if not dev or "dev" in t.tags]
    return chosen[:count]


async def evaluate(
    tasks: Mapping[str, Sequence[TaskRef]],
    play: Play,
    make_spec: Callable[[TaskRef, int, int, int], EpisodeSpec],
    *,
    samples: int,
    concurrency: int,
) -> EvalResult:
    """Play every task `samples` times. `make_spec(task, visit, member, retry)` pins version and temperature.

    visit is the task's place in the evaluation, member the sample's. At most `concurrency` episodes run at once.
    """
    limit = asyncio.Semaphore(concurrency)
    results: dict[str, dict[int, list[EpisodeSummary]]] = {suite: {} for suite in tasks}
    episodes: list[EvalEpisode] = []
    generated: Counter[str] = Counter()

    async def one(suite: str, task: TaskRef, visit: int, member: int) -> None:
        async with limit:
            failures = 0
            for retry in range(_ATTEMPTS):
                spec = make_spec(task, visit, member, retry)
                summary = await play(spec)
                generated[suite] += summary.generated
                failures += not summary.killed
                if summary.cause is None or failures > _RETRIES:
                    break
        results[suite].setdefault(visit, []).append(summary)
        episodes.append(_episode(task, spec.temperature, summary))

    async with task_group() as group:
        visit = 0
        for suite, chosen in tasks.items():
            for task in chosen:
                for member in range(samples):
                    group.create_task(one(suite, task, visit, member))
                visit += 1
    return EvalResult(
        {s: _suite_result(s, list(visits.values()), samples, generated[s]) for s, visits in results.items()},
        tuple(sorted(episodes, key=lambda e: (e.suite, e.task, e.sample))),
    )


def _episode(task: TaskRef, temperature: float, summary: EpisodeSummary) -> EvalEpisode:
    return EvalEpisode(
        suite=task.suite,
        task=task.id,
        sample=summary.member,
        temperature=temperature,
        status=summary.status,
        success=None if summary.cause is not None else bool(summary.success),
        reward=summary.reward,
        turns=summary.turns,
        tokens=summary.tokens,
        cause=summary.cause,
    )


def _suite_result(suite: str, visits: list[list[EpisodeSummary]], samples: int, generated: int) -> SuiteResult:
    played = [s for visit in visits for s in visit if s.cause is None]
    wins = sum(bool(s.success) for s in played)
    low, high = wilson(wins, len(played))
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k <= samples]
    status = Counter(s.status for s in played)
    count = max(1, len(played))
    return SuiteResult(
        suite=suite,
        episodes=len(played),
        success=wins / len(played) if played else math.nan,
        low=low,
        high=high,
        reward=sum(s.reward or 0.0 for s in played) / count,
        pass_at={k: _mean([pass_at_k([bool(s.success) for s in v if s.cause is None], k) for v in visits]) for k in ks},
        status={name: n / count for name, n in sorted(status.items())},
        env_errors=sum(s.cause is not None for visit in visits for s in visit),
        tokens=sum(s.tokens for s in played) / count,
        turns=sum(s.turns for s in played) / count,
        generated=generated,
        first_error=next((_error(s) for visit in visits for s in visit if s.cause is not None), ""),
    )


def _error(summary: EpisodeSummary) -> str:
    return f"{summary.cause}: {' '.join(summary.detail.split())[:300]}"


def pass_at_k(successes: Sequence[bool], k: int) -> float | None:
    """The unbiased estimate 1 - C(n-c, k)/C(n, k) (Chen et al. 2021, eq. 1); None when fewer than k were played."""
    n, c = len(successes), sum(successes)
    if n < k:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval (95% by default) of a proportion; (0, 1) without data."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Exactly the ends there: rounding puts them within by 1e-17, and a mean outside its own interval draws no picture.
    return 0.0 if successes == 0 else max(0.0, centre - half), 1.0 if successes == n else min(1.0, centre + half)


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else math.nan
