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

from springtide.schedule.composed import ClusterPolicy, Roles, Streaming
from springtide.schedule.ctb import Rules, TaskBatching
from springtide.schedule.ers import Signals
from springtide.schedule.events import Pipeline
from springtide.schedule.footprint import Decay
from springtide.schedule.hybrid_ranks import HybridRanks
from springtide.schedule.kv_aimd import KvAimd
from springtide.schedule.lending import Lending
from springtide.schedule.placement import LeastLoaded
from springtide.schedule.policy import Bounds, Cluster, Layout, Policy
from springtide.schedule.program_aware import ProgramAware
from springtide.schedule.slack import Slack
from springtide.schedule.time_shared import TimeShared
from springtide.schedule.waves import OneAhead, Waves


@dataclass(frozen=True, slots=True)
class Entry:
    """make: of bounds and the layout it starts with; layout: of a cluster; summary: one line, with its source; swept:
    it is to be started at the best `Cluster.share` of all."""

    make: Callable[[Bounds, Layout], Policy]
    layout: Callable[[Cluster], Layout]
    summary: str
    swept: bool = False


# Ours. A tool away for longer than computing the context again would take has lost its claim to KV by then: a budget of
# 200k to 900k tokens over 17k to 32k prefilled a second is 12 to 28 s.
OURS = Rules(
    decay=Decay("linear", 30.0),
    admit_share=0.95,
    turns_ahead=0.5,
    probe="unknown",
    estimate="mean",
    times=1.25,
    oldest=True,
    rebalance=True,
)


def split(cluster: Cluster, share: float, *, lendable: bool = False) -> Layout:
    """`share` of the ranks play (`cluster.share`, if given), the others train; none computes the reference alone."""
    share = share if cluster.share is None else cluster.share
    trainer = max(cluster.trainers, min(cluster.ranks - 1, round(cluster.ranks * (1 - share))), 1)
    rollout = cluster.ranks - trainer
    if rollout < 1:
        raise ValueError(f"{cluster.ranks} ranks, {cluster.trainers} of which hold the trainer, leave none to play")
    return Layout(rollout, 0, trainer, trainer if lendable else 0, _beside(cluster), cluster.sharded)


def _predicted(cluster: Cluster) -> float:
    """As training is predicted to need, less a tenth: generation also computes contexts again after publications and
    waits for its last, which no roofline knows. Where single ranks can be lent, two more train at first: they are lent
    if it pays, and a trainer that is too narrow can never be widened."""
    if cluster.training is None:
        return 0.5
    return 1 - (0.9 * cluster.training if cluster.sharded else cluster.training + 1.5 / cluster.ranks)


def _beside(cluster: Cluster) -> Pipeline:
    """The pipeline of a trainer that computes its own reference."""
    return "aggregate" if cluster.reference == "swapped" else cluster.reference


def _colocated(cluster: Cluster) -> Layout:
    return Layout(0, 0, cluster.ranks, cluster.ranks, _beside(cluster), cluster.sharded)


POLICIES: dict[str, Entry] = {
    "synchronous": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), TimeShared(b, at), Waves(b)),
        _colocated,
        "play and train in turns on all ranks (verl, slime: colocated)",
    ),
    "one_step_off": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), Roles(b, at), OneAhead(b)),
        lambda c: split(c, 0.5),
        "the next step's groups play while this one's are trained (verl's one-step-off)",
    ),
    "fixed_split": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), Roles(b, at)),
        lambda c: split(c, 0.75),
        "asynchronous at a fixed split, behind AReaL's staleness gate; three of four ranks play, as AReaL's do",
    ),
    "streaming": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), Streaming(b, at)),
        lambda c: split(c, 0.5),
        "a step takes groups as they become ready (StreamRL); static split, no length predictor",
    ),
    "kv_aimd": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), Roles(b, at), KvAimd(b)),
        lambda c: split(c, 0.75),
        "fixed split; episodes in flight follow the fullest rank's KV (prime-rl)",
    ),
    "program_aware": Entry(
        lambda b, at: ClusterPolicy(b, ProgramAware(), Roles(b, at)),
        lambda c: split(c, 0.75),
        "fixed split; programs are paused and packed by KV (ThunderAgent)",
    ),
    "hybrid_ranks": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), HybridRanks(b, at)),
        lambda c: split(c, 0.5, lendable=True),
        "trainer ranks host engines that wake when samples run short (verl's dynamic schedule)",
    ),
    "oracle_split": Entry(
        lambda b, at: ClusterPolicy(b, LeastLoaded(), Roles(b, at)),
        lambda c: split(c, 0.5),
        "fixed_split at the best share of a sweep, which the caller makes with `Cluster.share`",
        swept=True,
    ),
    "tiderl": Entry(
        lambda b, at: ClusterPolicy(b, TaskBatching(b, Rules()), Signals(b, at)),
        lambda c: split(c, 0.5),
        "TideRL's literal rules: CTB, RA2P and ERS by its signals; a run begins without reference ranks",
    ),
    "springtide": Entry(
        lambda b, at: ClusterPolicy(b, TaskBatching(b, OURS), Lending(b, at), Slack(b)),
        lambda c: split(c, _predicted(c), lendable=True),
        "ours: CTB by mean footprints, RA2P and ERS by predicted times, idle trainer ranks play",
    ),
}


def make_policy(name: str, bounds: Bounds, layout: Layout | None = None) -> Policy:
    """The policy of that name, for ranks that start as `layout` says. Raises: KeyError."""
    return POLICIES[name].make(bounds, layout or Layout(1, 0, 1))


def layout(name: str, cluster: Cluster) -> Layout:
    """How the policy of that name divides a cluster at the start. Raises: KeyError."""
    return POLICIES[name].layout(cluster)
