"""A preset on a cluster of GPUs: what a policy makes of it, as one row of figures.

Owns: how a workload, a model and a number of GPUs become a simulated world, and what is reported. Invariants: figures
are of the steps after a warm-up; a policy's row depends on the setup and the seed alone.
Called by: `springtide simulate`, `springtide advise`, the benchmarks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from springtide.schedule.events import Action, Event
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.policy import Cluster as Room
from springtide.schedule.registry import POLICIES, layout, make_policy
from springtide.schedule.roofline import DEVICES, Roofline, Shape, UnknownHardware, causal_pairs
from springtide.simulate.cluster import Cluster, Costs, World
from springtide.simulate.engine import CAUSES
from springtide.simulate.trainer import train_s
from springtide.simulate.workload import Source, Workload, episodes, mean_context, named, success

_MODELS = {"alfworld": "qwen2.5-7b", "webshop": "qwen2.5-7b", "office": "qwen2.5-14b", "swe": "qwen2.5-14b"}
_MODELS |= {"osworld": "qwen3-4b", "math": "qwen2.5-7b"}
_MOMENTS = 12  # bytes a parameter of the optimiser's state that a lent trainer rank moves out
_HALF = 16.0  # steps of staleness at which a group teaches half of what a fresh one does; see `worth`


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. workload: a preset's name, or laws; source: episodes of a trace instead; gpus: in all; tensor:
    of one rank; groups, members: of a step, of a group; concurrency: groups in flight, None: all that the staleness
    bound lets; reference: whether there is a KL term, and where its weights are; refill: groups of equal rewards are
    dropped and others drawn for them; evaluate_every, evaluate: steps
    between evaluations, tasks of one; warm, steps: those before the figures begin, those in them."""

    workload: str | Workload = "webshop"
    source: Source | None = None
    model: str = ""
    device: str = "h100"
    gpus: int = 8
    tensor: int = 1
    groups: int = 0
    members: int = 8
    concurrency: int | None = None
    bound: int = 2
    reference: Literal["none", "resident", "swapped"] = "swapped"
    refill: bool = True
    evaluate_every: int = 0
    evaluate: int = 0
    deaths_s: float = 0.0
    warm: int = 4
    steps: int = 12


@dataclass(frozen=True, slots=True)
class Row:
    """What a policy made of a setup: see docs/metrics.md. Times in seconds, shares in [0, 1]."""

    policy: str
    seed: int
    goodput_tokens_per_s: float
    computed_tokens_per_s: float
    step_s: float
    time_to_equal_learning_s: float
    kv_hit_rate: float
    rollout_wait_share: float
    train_wait_share: float
    recomputed: dict[str, int]
    staleness: float
    discarded: dict[str, int]
    switches: int
    layout: tuple[int, int, int]
    events: int


def worth(staleness: int) -> float:
    """What a group that lags so many steps teaches, of a fresh one: an assumption, fitted by eye to AReaL's decoupled
    loss (2505.24298: AIME24 42.0 at 0, 42.2 at 4, 41.0 at 8, 38.7 at 16, 36.9 without a bound)."""
    return 1 / (1 + (staleness / _HALF) ** 2)


class Simulation:
    """A setup made ready: rooflines, capacities, and the cluster that policies divide. Raises: UnknownHardware,
    WorkloadError."""

    def __init__(self, setup: Setup) -> None:
        name = setup.workload if isinstance(setup.workload, str) else ""
        self.workload = named(setup.workload) if isinstance(setup.workload, str) else setup.workload
        self.setup = setup = replace(
            setup, model=setup.model or _MODELS.get(name, "qwen2.5-7b"), groups=setup.groups or 4 * setup.gpus
        )
        if setup.device not in DEVICES:
            raise UnknownHardware(f"there is no device {setup.device!r}; there are {', '.join(DEVICES)}")
        if setup.gpus % setup.tensor:
            raise UnknownHardware(f"{setup.gpus} GPUs are no whole number of ranks of {setup.tensor}")
        shape = Shape.of(setup.model)
        self.roofline = Roofline(DEVICES[setup.device], shape, setup.tensor)
        self.budget = self.roofline.kv_capacity()
        if self.budget < self.workload.context:
            rank = f"a rank of {setup.tensor} {setup.device}"
            raise UnknownHardware(
                f"beside {setup.model} {rank} holds {max(0, self.budget)} tokens of KV, fewer than one context of "
                f"{self.workload.context}; give a rank more GPUs"
            )
        self.ranks = setup.gpus // setup.tensor
        devices = next(n for n in range(1, 1 << 20) if Roofline(DEVICES[setup.device], shape, n).trains())
        trainers = -(-devices // setup.tensor)
        if trainers >= self.ranks:
            raise UnknownHardware(
                f"training {setup.model} takes {devices} {setup.device}, which leaves none of {setup.gpus} to play"
            )
        state = _MOMENTS * shape.parameters / max(1, trainers)
        self.costs = Costs.of(self.roofline, state)
        self.room = Room(self.ranks, setup.reference, trainers, sharded=trainers > 1, training=self._training())
        most = (setup.bound + 1) * setup.groups
        self.bounds = Bounds(setup.groups, setup.concurrency or most, setup.bound, members=setup.members)

    def _source(self, seed: int) -> Source:
        return self.setup.source or episodes(self.workload, seed)

    def _training(self) -> float:
        """The share of rank-seconds that training takes, by the roofline, if ranks play at full KV."""
        source, setup = self._source(0), self.setup
        plans = [source(visit, 0, 0) for visit in range(64)]
        shared = 1 - 1 / setup.members  # of a prompt, which a group's tree of tokens holds once
        tokens, pairs = fmean(p.tokens - shared * p.prompt for p in plans), fmean(causal_pairs(p.tokens) for p in plans)
        train = train_s(self.roofline, tokens, pairs)
        if setup.reference != "none":
            train += self.roofline.logprobs_s(tokens, pairs)
        context = mean_context(source)
        sampled = fmean(sum(p.sampled) for p in plans)
        tool_s = fmean(p.reset_s + sum(p.tool_s) for p in plans)
        batch = max(1.0, min(self.budget / context, 3 * setup.groups * setup.members / self.ranks))
        for _ in range(8):  # of those in flight, some act
            decode_s = sampled * self.roofline.engine_step_s(decode=batch, context=batch * context)
            batch = max(1.0, (batch + batch * decode_s / (decode_s + tool_s)) / 2)
        play = sampled * self.roofline.engine_step_s(decode=batch, context=batch * context) / batch
        play += self.roofline.prefill_s(tokens - sampled, pairs)
        won = [success(self.workload, 0, visit, setup.members) for visit in range(256)]
        taught = (
            1.0 if not setup.refill else fmean(any(group) and not all(group) for group in won)
        )  # the others are played and not trained
        return train / (train + play / max(taught, 0.05))

    def layout(self, policy: str, share: float | None = None) -> Layout:
        return layout(policy, replace(self.room, share=share))

    def world(self, seed: int) -> World:
        """What a cluster of this setup plays on."""
        setup, workload = self.setup, self.workload

        def won(visit: int, members: int) -> list[bool]:
            return success(workload, seed, visit, members)

        return World(
            suites={"tasks": (1.0, self._source(seed), won)},
            roofline=self.roofline,
            trains=self.roofline,
            budget=self.budget,
            costs=self.costs,
            evaluate_every=setup.evaluate_every,
            evaluate=setup.evaluate,
            deaths_s=setup.deaths_s,
            equal=setup.refill,
            reference=setup.reference != "none",
        )

    def shares(self) -> list[float]:
        """Of ranks that play, all that leave room for the trainer."""
        return [n / self.ranks for n in range(1, self.ranks - self.room.trainers + 1)]

    def run(
        self,
        policy: str,
        seed: int,
        *,
        share: float | None = None,
        record: Callable[[Event | Action], None] | None = None,
    ) -> Row:
        """One run. share: of ranks that play, where the policy is to start so. Raises: Stuck."""
        setup, at, world = self.setup, self.layout(policy, share), self.world(seed)
        cluster = Cluster(world, make_policy(policy, self.bounds, at), self.bounds, at, seed=seed, record=record)
        cluster.run(setup.warm)
        before = _Totals(cluster)
        cluster.run(setup.warm + setup.steps)
        return _row(policy, seed, cluster, before, setup, at)

    def best_share(self, policy: str, seed: int = 0) -> float:
        """The share of ranks at which the policy's goodput is the largest."""
        return max(self.shares(), key=lambda share: self.run(policy, seed, share=share).goodput_tokens_per_s)

    def rows(self, policy: str, seeds: Sequence[int]) -> list[Row]:
        """A row a seed; a policy that is to be swept is, on the first seed."""
        share = self.best_share(policy, seeds[0]) if POLICIES[policy].swept else None
        return [self.run(policy, seed, share=share) for seed in seeds]


class _Totals:
    """What a cluster had done when its warm-up ended."""

    def __init__(self, cluster: Cluster) -> None:
        self.now, self.steps, self.taken = cluster.now, len(cluster.steps), len(cluster.staleness)
        self.trained = Counter(cluster.trained)
        self.discarded = Counter(cluster.discarded)
        self.prefilled = {cause: sum(r.engine.prefilled[cause] for r in cluster.ranks.values()) for cause in CAUSES}
        self.hits = sum(r.engine.hits for r in cluster.ranks.values())
        self.seconds = {name: dict(rank.seconds) for name, rank in cluster.ranks.items()}
        self.switches, self.events = cluster.switches, cluster.events


def _row(policy: str, seed: int, cluster: Cluster, before: _Totals, setup: Setup, at: Layout) -> Row:
    after = _Totals(cluster)
    wall = after.now - before.now
    trained = after.trained - before.trained
    prefilled = {cause: after.prefilled[cause] - before.prefilled[cause] for cause in CAUSES}
    hits = after.hits - before.hits
    spent: defaultdict[str, float] = defaultdict(float)
    for name, seconds in after.seconds.items():
        for doing, total in seconds.items():
            spent[doing] += total - before.seconds.get(name, {}).get(doing, 0.0)
    learned = sum(map(worth, cluster.staleness[before.taken :]))
    return Row(
        policy=policy,
        seed=seed,
        goodput_tokens_per_s=trained["sampled"] / wall,
        computed_tokens_per_s=trained["tokens"] / wall,
        step_s=wall / max(1, after.steps - before.steps),
        time_to_equal_learning_s=setup.steps * setup.groups / (learned / wall) if learned else math.inf,
        kv_hit_rate=hits / max(1, hits + sum(prefilled.values())),
        rollout_wait_share=spent["wait"] / max(1e-9, spent["wait"] + spent["decode"]),
        train_wait_share=spent["idle"] / max(1e-9, spent["idle"] + spent["train"]),
        recomputed={cause: count for cause, count in prefilled.items() if cause != "fresh"},
        staleness=fmean(cluster.staleness[before.taken :] or [0]),
        discarded=dict(after.discarded - before.discarded),
        switches=after.switches - before.switches,
        layout=(at.rollout, at.reference, at.trainer),
        events=after.events - before.events,
    )


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and 95% interval (of seeds, Student's) of every figure of a policy's rows."""
    out: dict[str, Any] = {"policy": rows[0].policy, "seeds": len(rows), "layout": rows[0].layout}
    for name in (
        "goodput_tokens_per_s",
        "computed_tokens_per_s",
        "step_s",
        "time_to_equal_learning_s",
        "kv_hit_rate",
        "rollout_wait_share",
        "train_wait_share",
        "staleness",
        "switches",
    ):
        values = [float(getattr(row, name)) for row in rows]
        mean = fmean(values)
        half = _half(values)
        out[name] = mean
        out[f"{name}_low"], out[f"{name}_high"] = mean - half, mean + half
    return out


_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's, by degrees of freedom


def _half(values: Sequence[float]) -> float:
    n = len(values)
    if n < 2:
        return math.nan
    mean = fmean(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return (_T95[n - 2] if n - 2 < len(_T95) else 1.96) * deviation / math.sqrt(n)
