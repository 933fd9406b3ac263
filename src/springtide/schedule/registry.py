"""Every scheduling policy by name, and how each divides a cluster into roles at the start.

Owns: the names (DESIGN 8), and the first `Layout` of each. What a world does with a policy, live or simulated:

1. `layout(name, cluster)`; then a `RankJoined` for every rank of it. Lendable are the trainer's last ranks.
2. `policy = make_policy(name, bounds, layout)`, and `state.follow(policy)` before the first event, so that the policy
   sees every event, whenever it is asked. It starts with `layout.pipeline`.
3. After every event `policy.decide(state)`, carry out, again, until it returns none. `Route`, `Pause`, `Resume` and
   `Abort` are answered at once (`Placed`, `Paused`, `Resumed`, `Dropped`), `Admit` by `Admitted`, `SwitchRole` by
   `RoleChanged` when it is done; until then the rank does what it did, or nothing, and `state.switching` names it.
   `ChoosePipeline` and `SetFetch` hold from the next step on. `Sync` comes last of what is asked at the edge (after
   `Updated`): the world carries out the switches and publishes, then says `StepEnded`.
4. While no step is under way, `policy.batch(state)` after the decisions. A batch with `more` streams.

All policies here place episodes themselves (`Route`) as soon as there are ranks in the state; without any, none does.
Called by: the driver and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from springtide.schedule.events import Pipeline
from springtide.schedule.policy import Bounds, Cluster, Layout, Policy
from springtide.schedule.simple import FixedSplit, Synchronous


@dataclass(frozen=True, slots=True)
class Entry:
    """make: of bounds and the layout it starts with; layout: of a cluster; summary: one line, with its source."""

    make: Callable[[Bounds, Layout], Policy]
    layout: Callable[[Cluster], Layout]
    summary: str


def split(cluster: Cluster, share: float, *, apart: bool = False, lendable: bool = False) -> Layout:
    """`share` of the ranks play, the others train; `apart`: one of the others computes the reference, if there is one
    that does not fit beside the trainer."""
    trainer = max(cluster.trainers, min(cluster.ranks - 1, round(cluster.ranks * (1 - share))))
    reference = 1 if apart and cluster.reference == "swapped" and trainer > cluster.trainers else 0
    pipeline = _beside(cluster) if not reference else "streaming"
    trainer -= reference
    lent = trainer if lendable else 0
    return Layout(cluster.ranks - trainer - reference, reference, trainer, lent, pipeline)


def _beside(cluster: Cluster) -> Pipeline:
    """The pipeline of a trainer that computes its own reference."""
    return "aggregate" if cluster.reference == "swapped" else cluster.reference


def _colocated(cluster: Cluster) -> Layout:
    return Layout(0, 0, cluster.ranks, cluster.ranks, _beside(cluster))


POLICIES: dict[str, Entry] = {
    "synchronous": Entry(lambda b, _: Synchronous(b), _colocated, "play and train in turns on all ranks"),
    **{
        name: Entry(lambda b, _: FixedSplit(b), lambda c: split(c, 0.5), "to come")
        for name in (
            "one_step_off", "fixed_split", "streaming", "kv_aimd", "program_aware", "hybrid_ranks", "oracle_split",
            "tiderl", "springtide",
        )
    },
}  # fmt: skip


def make_policy(name: str, bounds: Bounds, layout: Layout | None = None) -> Policy:
    """The policy of that name, for ranks that start as `layout` says. Raises: KeyError."""
    return POLICIES[name].make(bounds, layout or Layout(1, 0, 1))


def layout(name: str, cluster: Cluster) -> Layout:
    """How the policy of that name divides a cluster at the start. Raises: KeyError."""
    return POLICIES[name].layout(cluster)
