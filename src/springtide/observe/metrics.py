"""The figures of a run: what each step and each evaluation says, and the summary at the end.

Owns: the definition of every metric (`docs/metrics.md` gives the formulas) and the records in `metrics.jsonl`.
Invariants: every figure is a sum over episodes or tokens divided once, never a mean of means (trl#7047); a record
carries the step it belongs to; the summary is computed from the records on disk, so a resumed run's covers all of it.
Called by: the driver.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from springtide.engine.protocol import EngineStats
from springtide.observe.pace import PaceMeter, summarise_pace
from springtide.observe.sinks import Sink, read_records
from springtide.process import task_group
from springtide.rollout.evaluate import EvalResult
from springtide.rollout.feeder import Counts
from springtide.schedule.readiness import Readiness
from springtide.trace import version_step

_LAG_SAMPLE_S = 0.02
_MEMORY_SAMPLE_S, _MEMORY_SHARE = 5.0, 0.005  # the kernel walks every process's pages for it
_COUNTS = (  # of an engine's figures, those that only grow
    "generated_tokens",
    "aborted_tokens",
    "computed_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "busy_s",
    "idle_s",
    "paused_s",
)


class Display(Protocol):
    """What shows a run to the person who watches it (see `observe.progress`)."""

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def waiting(self, reason: str, admission: str) -> None: ...

    def doing(self, what: str, done: int = 0, total: int = 0) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """`summary.json`. Shares are of the loop's wall time; success and greedy are means over suites."""

    steps: int
    wall_s: float
    success_start: float | None
    success_end: float | None
    greedy_start: float | None
    greedy_end: float | None
    per_suite: dict[str, dict[str, float | None]]
    loss_tokens: int
    goodput_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    stale_pool_lag_mean: float
    kv_hit_rate: float
    rollout_wait_share: float
    train_wait_share: float
    env_errors: int
    discarded_tokens: int
    logprob_gap_mean: float
    peak_pss_mib: float
    seed: int
    commit: str
    ledger: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # generated = trained + evaluated + discarded + cut off
    pace: dict[str, Any] | None = None  # of a run on paced devices; its `void` says why it measures nothing

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Metrics:
    """Turns what happened into records, and hands them to the sinks and the display."""

    def __init__(self, sinks: Sequence[Sink], display: Display, pace: PaceMeter | None = None) -> None:
        self._sinks, self._display, self._pace = sinks, display, pace
        self._last_t = 0.0
        self._last_spent: dict[str, float] = {}
        self._last_engine = EngineStats()
        self._lags: deque[float] = deque(maxlen=3000)
        self._cut_steps = 0  # steps in which every episode was cut at a limit
        self.peak_pss_mib = 0.0

    async def watch_loop(self) -> None:
        """Sample the driver's event-loop lag, and the memory of all processes of the run."""
        async with task_group() as tasks:
            tasks.create_task(self._watch_memory())  # beside it: a lag while it looks is a lag
            while True:
                before = time.monotonic()
                await asyncio.sleep(_LAG_SAMPLE_S)
                self._lags.append(max(0.0, time.monotonic() - before - _LAG_SAMPLE_S))

    async def _watch_memory(self) -> None:
        while True:
            begun = time.monotonic()
            total = await asyncio.to_thread(pss_mib, [os.getpid()])  # all others are its children
            self.peak_pss_mib = max(self.peak_pss_mib, total)
            await asyncio.sleep(max(_MEMORY_SAMPLE_S, (time.monotonic() - begun) / _MEMORY_SHARE))

    def waiting(self, reason: str, admission: str) -> None:
        self._display.waiting(reason, admission)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """What goes on outside the loop, and how far it has come; shown, not recorded."""
        self._display.doing(what, done, total)

    def note(self, step: int, text: str) -> None:
        """A state a person should see: written, shown, and not an error."""
        self._write({"kind": "note", "step": step, "text": text})
        self._display.note(text)

    def begin(self, engines: Sequence[EngineStats], paced: Mapping[str, float] | None = None) -> None:
        """The loop begins: what engines did before it is not its first step's, but for tokens, which all count."""
        if self._pace is not None:
            self._pace.begin(engines, paced or {})
        self._last_engine = replace(
            _total(engines),
            generated_tokens=self._last_engine.generated_tokens,
            aborted_tokens=self._last_engine.aborted_tokens,
        )
        self.doing("training")

    def resumed(self, step: int, elapsed: float, incarnation: int) -> None:
        self._last_t = elapsed
        self._write({"kind": "resume", "step": step, "incarnation": incarnation})

    def step(
        self,
        *,
        step: int,
        summaries: Sequence[Mapping[str, Any]],
        learned: dict[str, Any],
        counts: Counts,
        spent: Mapping[str, float],
        elapsed: float,
        engines: Sequence[EngineStats],
        state: Readiness,
        restarts: dict[str, int],
        paced: Mapping[str, float] | None = None,
    ) -> None:
        """One optimiser step: `summaries` are the trained groups', `counts` all episodes that ended since the last."""
        step_s = max(1e-9, elapsed - self._last_t)
        stale = [max(0, step - 1 - version_step(b)) for s in summaries for b in s["births"] if b is not None]
        lags = [max(0, step - 1 - drawn) for s in summaries for drawn in s["stale_steps"]]
        engine = _total(engines)
        delta = _difference(engine, self._last_engine)
        success = {suite: _mean(values) for suite, values in sorted(counts.success.items())}
        record = {
            "kind": "step",
            "step": step,
            "t": elapsed,
            "step_s": step_s,
            "groups": len(summaries),
            "trajectories": sum(len(s["members"]) for s in summaries),
            "loss_tokens": int(learned.get("loss_tokens", 0)),
            "goodput_tokens_per_s": learned.get("loss_tokens", 0) / step_s,
            "success": {"mean": _mean(list(success.values())) if success else None, **success},
            "reward": {suite: _mean(values) for suite, values in sorted(counts.reward.items())},
            "mixture": {suite: n / max(1, sum(state.consumed.values())) for suite, n in sorted(state.consumed.items())},
            "staleness": {
                "mean": _mean(stale),
                "max": max(stale, default=0),
                "stale_pool_lag": _mean(lags),
                "stale_turns": len(lags),
                "turns": sum(s["turns"] for s in summaries),
            },
            "seconds": {cause: spent[cause] - self._last_spent.get(cause, 0.0) for cause in sorted(spent)},
            "status": {k: v / max(1, counts.status.total()) for k, v in sorted(counts.status.items())},
            "episodes": counts.status.total(),
            "cut_turn_share": counts.cut_turns / max(1, counts.turns),
            "refused_actions": dict(counts.refused),
            "ignored_news": dict(counts.ignored),
            "dropped": dict(counts.dropped),
            "env_errors": dict(counts.env_errors),
            "discarded_tokens": dict(counts.discarded),
            "tokens_a_group": {"kept": _mean(counts.kept_tokens), "dropped": _mean(counts.dropped_tokens)},
            "engine": {
                "busy_share": delta.busy_s / max(1e-9, delta.busy_s + delta.idle_s + delta.paused_s),
                "kv_hit_rate": delta.cached_tokens / max(1, delta.cached_tokens + delta.computed_tokens),
                "generated_tokens": delta.generated_tokens,
                "aborted_tokens": delta.aborted_tokens,
                "computed_tokens": delta.computed_tokens,
                "cached_tokens": delta.cached_tokens,
                "recomputed_tokens": delta.recomputed_tokens,
                "kv_tokens": engine.kv_tokens,
            },
            "trainer": learned,
            "pending": {"in_flight": len(state.in_flight()), "ready": len(state.ready())},
            "restarts": restarts,
            "driver_lag_p99_s": _quantile(self._lags, 0.99),
            "pss_mib": self.peak_pss_mib,
            **({"pace": self._pace.take(engines, paced or {}, step_s)} if self._pace else {}),
        }
        self._last_t, self._last_engine = elapsed, engine
        self._last_spent = dict(spent)
        self._write(record)
        self._display.step(record)
        finished = counts.status.total() - counts.status["environment_error"]
        limited = sum(counts.status[status] for status in ("turn_limit", "context_limit", "time_limit"))
        if finished and (limited == finished or counts.cut_turns == counts.turns > 0):
            self._cut_steps += 1
            if self._cut_steps == 1:  # once: `status` and `cut_turn_share` say it of every step
                self.note(
                    step,
                    "every episode since the last step was cut at a limit of turns, context, time or tokens a turn: "
                    "raise rollout.max_turns, rollout.max_new_tokens or model.context",
                )

    def evaluation(self, label: str, step: int, sampled: EvalResult, greedy: EvalResult | None) -> None:
        record = {
            "kind": "eval",
            "label": label,
            "step": step,
            "success": sampled.success,
            "greedy": greedy.success if greedy else None,
            "generated_tokens": sum(s.generated for r in (sampled, greedy) if r for s in r.suites.values()),
            "suites": {
                suite: {
                    **asdict(result),
                    "greedy": greedy.suites[suite].success if greedy else None,
                    "greedy_low": greedy.suites[suite].low if greedy else None,
                    "greedy_high": greedy.suites[suite].high if greedy else None,
                    "greedy_status": greedy.suites[suite].status if greedy else None,
                }
                for suite, result in sampled.suites.items()
            },
        }
        self._write(record)
        self._display.evaluation(record)

    def ended(self, step: int, counts: Counts, engines: Sequence[EngineStats]) -> None:
        """What happened after the last step: with it the tokens of `generated` all have their end."""
        if self._cut_steps > 1:
            self.note(step, f"in {self._cut_steps} steps every episode was cut at a limit")
        delta = _difference(_total(engines), self._last_engine)
        self._write(
            {
                "kind": "end",
                "step": step,
                "episodes": counts.status.total(),
                "dropped": dict(counts.dropped),
                "env_errors": dict(counts.env_errors),
                "discarded_tokens": dict(counts.discarded),
                "engine": {"generated_tokens": delta.generated_tokens, "aborted_tokens": delta.aborted_tokens},
            }
        )

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)


def summarise(path: Path, ledger: dict[str, Any], *, seed: int, commit: str, peak_pss_mib: float) -> Summary:
    """The summary of the run whose `metrics.jsonl` is `path`; `ledger` is its audit."""
    records = read_records(path)
    steps = [r for r in records if r["kind"] == "step"]
    all_counts = [r for r in records if r["kind"] in ("step", "end")]
    discarded = sum(sum(r["discarded_tokens"].values()) for r in all_counts)
    stale_turns = sum(r["staleness"]["stale_turns"] for r in steps)
    evals = {r["label"]: r for r in records if r["kind"] == "eval"}
    start, end = evals.get("start"), evals.get("end")
    wall = steps[-1]["t"] if steps else 0.0
    tokens = sum(r["loss_tokens"] for r in steps)
    trajectories = sum(r["trajectories"] for r in steps)
    seconds: Counter[str] = Counter()
    for r in steps:
        seconds.update(r["seconds"])
    computed = sum(r["engine"]["computed_tokens"] for r in steps)
    cached = sum(r["engine"].get("cached_tokens", 0) for r in steps)  # absent in older records
    suites = sorted({s for r in (start, end) if r for s in r["suites"]})
    return Summary(
        steps=steps[-1]["step"] if steps else 0,
        wall_s=wall,
        success_start=_of(start, "success"),
        success_end=_of(end, "success"),
        greedy_start=_of(start, "greedy"),
        greedy_end=_of(end, "greedy"),
        per_suite={
            s: {
                f"{key}_{when}": _of((record or {"suites": {}})["suites"].get(s), key)
                for when, record in (("start", start), ("end", end))
                for key in ("success", "greedy")
            }
            for s in suites
        },
        loss_tokens=tokens,
        goodput_tokens_per_s=tokens / wall if wall else 0.0,
        staleness_mean=sum(r["staleness"]["mean"] * r["trajectories"] for r in steps) / max(1, trajectories),
        staleness_max=max((r["staleness"]["max"] for r in steps), default=0),
        stale_pool_lag_mean=sum(r["staleness"]["stale_pool_lag"] * r["staleness"]["stale_turns"] for r in steps)
        / max(1, stale_turns),
        kv_hit_rate=cached / max(1, cached + computed),
        rollout_wait_share=sum((1 - r["engine"]["busy_share"]) * r["step_s"] for r in steps) / wall if wall else 0.0,
        train_wait_share=sum(v for k, v in seconds.items() if k.startswith("wait_")) / wall if wall else 0.0,
        env_errors=sum(sum(r["env_errors"].values()) for r in all_counts),
        discarded_tokens=discarded,
        logprob_gap_mean=_pooled_gap(steps),
        peak_pss_mib=max([peak_pss_mib, *(r["pss_mib"] for r in steps)]),
        seed=seed,
        commit=commit,
        ledger=ledger,
        tokens={
            "generated": sum(r["engine"]["generated_tokens"] for r in all_counts),
            "trained": tokens,
            "evaluated": sum(r["generated_tokens"] for r in records if r["kind"] == "eval"),
            "discarded": discarded,
            "aborted": sum(r["engine"].get("aborted_tokens", 0) for r in all_counts),  # absent in older records
        },
        pace=summarise_pace(steps),
    )


def pss_mib(pids: Sequence[int]) -> float:
    """Proportional set size of the processes `pids` and all their children, in MiB (shared pages counted once)."""
    total, seen, queue = 0, set(), list(pids)
    while queue:
        pid = queue.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue  # it ended meanwhile
    return total / 1024


def _pooled_gap(steps: Sequence[Mapping[str, Any]]) -> float:
    """|log-prob of the trainer - of the engine| over all tokens sampled with the very weights that were trained."""
    counts = [r["trainer"].get("gap_tokens", 0) for r in steps]
    sums = [(r["trainer"].get("gap_mean") or 0.0) * n for r, n in zip(steps, counts, strict=True)]
    return sum(sums) / max(1, sum(counts))


def _total(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        **{name: sum(getattr(s, name) for s in stats) for name in (*_COUNTS, "kv_tokens", "kv_capacity")}
    )


def _difference(new: EngineStats, old: EngineStats) -> EngineStats:
    return EngineStats(**{name: max(0, getattr(new, name) - getattr(old, name)) for name in _COUNTS})


def _of(record: Mapping[str, Any] | None, key: str) -> float | None:
    value = record.get(key) if record else None
    return None if value is None or math.isnan(value) else float(value)


def _mean(values: Sequence[float]) -> float:
    try:
        return statistics.fmean(values) if values else 0.0
    except (OverflowError, ValueError):  # a sum beyond what a float holds, inf - inf: a figure must not end a run
        return sum(value / len(values) for value in values)


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def commit() -> str:
    """The source's commit, "-dirty" appended where it differs; empty outside a checkout."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            text=True,
            capture_output=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
