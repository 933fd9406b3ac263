"""How fast the scheduler decides: events a minute with the policy in the loop, and the time of a decision.

  events      the simulated cluster of 32 ranks, `webshop`, its engines, trainer and policy in one thread
  decisions   64,000 live episodes on 512 ranks: following an event and deciding, mean and 99th percentile
  ranks       1,000 ranks, three steps after the warm-up
On one quiet core about ten minutes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Load, Row, arguments, emit, report

from springtide.schedule.registry import make_policy
from springtide.simulate.cluster import Cluster
from springtide.simulate.run import Setup, Simulation

POLICY = "springtide"


def cluster_of(setup: Setup, policy: str = POLICY) -> Cluster:
    simulation = Simulation(setup)
    layout = simulation.layout(policy)
    return Cluster(simulation.world(0), make_policy(policy, simulation.bounds, layout), simulation.bounds, layout)


def events_a_minute(quick: bool, policy: str) -> tuple[float, int]:
    cluster = cluster_of(Setup(gpus=32, groups=64), policy)
    cluster.run(1)
    before, started = cluster.events, time.process_time()
    cluster.run(2 if quick else 6)
    return (cluster.events - before) * 60 / (time.process_time() - started), cluster.events - before


class _Timed:
    """A policy whose every look at an event and every decision is timed together."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.seconds: list[float] = []
        self._spent = 0.0
        for name in ("batch", "feed", "blocked"):
            setattr(self, name, getattr(policy, name))

    def observe(self, *given: Any) -> None:
        started = time.perf_counter()
        self._policy.observe(*given)
        self._spent += time.perf_counter() - started

    def decide(self, state: Any) -> Any:
        started = time.perf_counter()
        actions = self._policy.decide(state)
        self.seconds.append(self._spent + time.perf_counter() - started)
        self._spent = 0.0
        return actions


def decisions(quick: bool) -> tuple[np.ndarray, int]:
    """Seconds of each, and how many episodes were alive."""
    groups = 1000 if quick else 8000
    setup = Setup("swe", gpus=512, groups=groups // 4, concurrency=groups, bound=8, reference="none")
    simulation = Simulation(setup)
    layout = simulation.layout(POLICY)
    policy: Any = _Timed(make_policy(POLICY, simulation.bounds, layout))
    cluster = Cluster(simulation.world(0), policy, simulation.bounds, layout)
    state = cluster.state
    while state.alive < groups * setup.members and cluster.now < 300:
        cluster.run(1, most_s=cluster.now + 5)
    alive = state.alive
    policy.seconds.clear()
    gc.collect()
    cluster.run(1, most_s=cluster.now + (1 if quick else 20))
    return np.array(policy.seconds), alive


def thousand(quick: bool) -> float:
    cluster = cluster_of(Setup(gpus=64 if quick else 1000, groups=64 if quick else 1000))
    cluster.run(1)
    started = time.process_time()
    cluster.run(2 if quick else 4)
    return time.process_time() - started


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    with Load() as load:
        rate, count = events_a_minute(args.quick, POLICY)
        plain, _ = events_a_minute(args.quick, "fixed_split")
        seconds, alive = decisions(args.quick)
        ranks = thousand(args.quick)
    mean, high = float(seconds.mean()), float(np.quantile(seconds, 0.99))
    rows = [
        Row(f"events a minute, 32 ranks, {POLICY}", rate, "events", required=2e6, extra={"events": count}),
        Row("events a minute, 32 ranks, fixed_split", plain, "events"),
        Row(f"decision at {alive:,} live episodes, mean", mean * 1e6, "us", required=20, at_most=True),
        Row(f"decision at {alive:,} live episodes, 99%", high * 1e3, "ms", required=1, at_most=True),
        Row("three steps of 1,000 ranks", ranks / 60, "minutes", required=20, at_most=True),
    ]
    emit(report("scheduler_speed", rows, load, quick=args.quick), as_json=args.json)


if __name__ == "__main__":
    main()
