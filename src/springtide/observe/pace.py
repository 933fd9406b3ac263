"""Paced devices in the record: how much CPU a run used, how far its work was from the roofline, and whether it is void.

Owns: the `pace` part of a step's record and of the summary (`docs/metrics.md`), the limits beyond which a run is void,
and the scale that a calibration's record asks for. Invariants: shares and deviations are sums divided once; a
percentile is of all steps, from counts by 1% of ratio that add up.
Called by: `observe.metrics`, `trainer.calibrate`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.engine.protocol import EngineStats
from springtide.pace import KINDS

MOST_CPU = 0.7  # of the cores: beyond it processes wait for one another, not for their devices
MOST_DEVIATION = 0.05  # of a kind of work's time, over the run: a twentieth is what we call a measurement
_AIM_CPU, _AIM_SHARE = 0.5, 0.95  # where a calibrated run should be: half the cores, one step in twenty an overrun


class PaceMeter:
    """What paced ranks and the CPU did between two records."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._counts: Counter[str] = Counter()
        self._cpu_s = 0.0

    def begin(self, engines: Sequence[EngineStats], others: Mapping[str, float]) -> None:
        """Forget what was before. others: the counts of ranks that are no engines."""
        self._counts, self._cpu_s = _total(engines, others), cpu_seconds(os.getpid())

    def take(self, engines: Sequence[EngineStats], others: Mapping[str, float], wall_s: float) -> dict[str, Any]:
        """The record of what came since, in `wall_s` seconds."""
        counts, before = _total(engines, others), self._counts
        cpu_s, cpu_before = cpu_seconds(os.getpid()), self._cpu_s
        self._counts, self._cpu_s = counts, cpu_s
        new = {name: max(0.0, value - before[name]) for name, value in counts.items()}
        return {"scale": self.scale, **_cpu(max(0.0, cpu_s - cpu_before), wall_s), **_kinds(new)}


def summarise_pace(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The summary of the `pace` parts of steps; None where there are none. `void`: why the run measures nothing."""
    parts = [r["pace"] for r in records if r.get("pace")]
    if not parts:
        return None
    whole, scales = _pooled(parts), {part["scale"] for part in parts}
    for kind in KINDS:
        whole.get(kind, {}).pop("spread", None)
    summary = {"scale": max(scales), **whole}
    return {**summary, "void": _void(summary, scales)}


def _pooled(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(_counts_of(part))
    return {**_cpu(sum(p["cpu_s"] for p in parts), sum(p["wall_s"] for p in parts)), **_kinds(counts)}


def describe(pace: Mapping[str, Any]) -> str:
    """A summary's `pace` in a line."""
    kinds = ", ".join(
        f"{kind} {pace[kind]['deviation']:.1%} (p99 {pace[kind]['deviation_p99']:.1%}, "
        f"{pace[kind]['overrun_share']:.1%} overran)"
        for kind in KINDS
        if kind in pace
    )
    return f"paced at scale {pace['scale']:g}: CPU {pace['cpu_share']:.0%}, above the roofline: {kinds or 'no work'}"


def scale_for(records: Iterable[Mapping[str, Any]], engines: int, trainers: int = 1) -> float | None:
    """The scale at which a run like this would keep to its pace; None where no step was measured.

    records: of the steps of a run that held nothing back, so that its targets are the roofline times. It will last at
    least as long as the trainer or an engine works, so its CPU share is at most cpu_s / (cores x scale x that); and
    each kind's steps but one in twenty must take less than their scaled time.
    """
    parts = [r["pace"] for r in records if r.get("pace")]
    whole = _pooled(parts)
    kinds = {kind: whole[kind] for kind in KINDS if kind in whole}
    if not kinds:
        return None
    target_s = {kind: part["target_s"] for kind, part in kinds.items()}
    trained_s = target_s.get("forward", 0.0) + target_s.get("backward", 0.0)
    busiest_s = max(target_s.get("engine", 0.0) / engines, trained_s / trainers)
    by_cpu = whole["cpu_s"] / (_AIM_CPU * cores() * busiest_s) if busiest_s > 0 else 0.0
    return _round_up(max(by_cpu, *(_quantile(part["spread"], _AIM_SHARE) for part in kinds.values())))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it so far, ended children included; 0 where there is no `/proc`."""
    ticks, queue = 0, [pid]
    while queue:
        pid = queue.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue  # it ended meanwhile: its parent has its time
    return ticks / os.sysconf("SC_CLK_TCK")


def cores() -> float:
    """How many cores this process may use: its affinity, and its control group's quota where that is less."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(count, int(quota) / int(period))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return count


def _total(engines: Sequence[EngineStats], others: Mapping[str, float]) -> Counter[str]:
    total: Counter[str] = Counter(others)
    for engine in engines:
        total.update(engine.extra.get("pace", {}))
    return total


def _cpu(cpu_s: float, wall_s: float) -> dict[str, float]:
    return {"wall_s": wall_s, "cpu_s": cpu_s, "cpu_share": cpu_s / (cores() * wall_s) if wall_s > 0 else 0.0}


def _kinds(counts: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By kind of work, those of which there was some."""
    out: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        steps, target_s = counts.get(f"{kind}/steps", 0), counts.get(f"{kind}/target_s", 0.0)
        if steps and target_s > 0:
            prefix = f"{kind}/spread/"
            spread = sorted(
                (int(k.removeprefix(prefix)), int(n)) for k, n in counts.items() if k.startswith(prefix) and n
            )
            overran, took_s = counts.get(f"{kind}/overran", 0), counts[f"{kind}/took_s"]
            out[kind] = {
                "steps": int(steps),
                "target_s": target_s,
                "took_s": took_s,
                "overran": int(overran),
                "deviation": took_s / target_s - 1,
                "deviation_p99": _quantile(spread, 0.99) - 1,
                "overrun_share": overran / steps,
                "spread": spread,
            }
    return out


def _counts_of(part: Mapping[str, Any]) -> dict[str, float]:
    """A record's counts again, as ranks give them."""
    return {
        name: value
        for kind in KINDS
        if kind in part
        for name, value in (
            *((f"{kind}/{key}", part[kind][key]) for key in ("steps", "target_s", "took_s", "overran")),
            *((f"{kind}/spread/{k}", n) for k, n in part[kind]["spread"]),
        )
    }


def _quantile(spread: Sequence[Sequence[int]], q: float) -> float:
    """The ratio of time taken to target that a share q of steps does not exceed."""
    left = q * sum(n for _, n in spread)
    for k, n in spread:
        left -= n
        if left <= 0:
            return math.exp(k / 100)
    return 1.0


def _void(summary: Mapping[str, Any], scales: set[float]) -> str | None:
    faults = []
    if summary["cpu_share"] > MOST_CPU:
        faults.append(f"it used {summary['cpu_share']:.0%} of the CPU (at most {MOST_CPU:.0%})")
    for kind in KINDS:
        if kind in summary and summary[kind]["deviation"] > MOST_DEVIATION:
            more = f"{summary[kind]['deviation']:.1%} (at most {MOST_DEVIATION:.0%})"
            faults.append(f"{kind} took {more} longer than the roofline")
    if len(scales) > 1:
        faults.append(f"its scale changed ({', '.join(f'{s:g}' for s in sorted(scales))})")
    if not faults:
        return None
    remedy = f"free the machine of other work, or raise runtime.pace.scale (now {summary['scale']:g})"
    return f"this paced run is void as a measurement: {'; '.join(faults)}; {remedy}"


def _round_up(value: float) -> float:
    """To two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit) * unit, 6)
