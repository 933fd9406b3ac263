"""How long a step would take with other roles: what generation makes, what training takes.

Owns: the predictions that `ers.py` and `lending.py` compare. Pure functions of the measures in `Readiness`. Generation
is a closed loop (Little's law): N episodes cycle between a rank, where a sampled token takes `a + b x (episodes that
decode there)` seconds (the line is fitted to measured turns), and their tools. So a rank more helps as much as batches
on the others get faster, which is much where KV binds and little where latency does; the paper's rate a rank (`B / (r
g)`) would always promise r + 1 over r.
Called by: `ers.py`, `lending.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from springtide.schedule.events import Pipeline
from springtide.schedule.policy import Bounds
from springtide.schedule.ra2p import Piece, arrivals, predict_s
from springtide.schedule.readiness import Readiness

_SWAP_S = 0.6  # of 30 GB over PCIe at 50 GB/s, before one was measured
_FULL = 0.9  # of a KV budget that episodes fill
_PIECES = 2  # of work for each trainer rank at least, else a step's end is all quantisation
_ROUNDS = 12  # of the fixed point; it contracts by a half or more


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks of each role."""

    rollout: int
    reference: int
    trainer: int


def groups_per_s(state: Readiness, bounds: Bounds, ranks: int) -> float | None:
    """What that many rollout ranks would make; None before anything was measured."""
    line, flying = state.decode.fit, state.flying.value
    stats = [s for s in state.suites.values() if s.turns.value]
    if line is None or flying is None or not stats or ranks < 1:
        each = state.group_rank_s.value
        return ranks / each if each else None
    share = 1 / len(stats)
    turns = share * sum(s.turns.value or 0.0 for s in stats)
    sampled = share * sum(s.sampled.value or 0.0 for s in stats)
    tool_s = share * sum(s.tool_s.value or 0.0 for s in stats)
    context = share * sum(((s.first.value or 0.0) + (s.final.value or 0.0)) / 2 for s in stats)
    playing = [rank for rank in state.rollout_ranks()]
    budget = max((rank.budget for rank in playing), default=0)
    episodes = max(1.0, flying)
    if budget and context:
        holds = _FULL * budget / context  # episodes of a rank
        if flying > 0.8 * holds * len(playing):  # KV binds now: more ranks would take more
            wanted = 0.7 * min(bounds.concurrency, (bounds.bound + 1) * bounds.groups) * bounds.members
            episodes = max(episodes, wanted)
        episodes = max(1.0, min(episodes, holds * ranks))
    first, slope = line
    batch = episodes / ranks
    for _ in range(_ROUNDS):
        decode_s = sampled * (first + slope * batch)
        batch = (batch + episodes / ranks * decode_s / max(1e-9, decode_s + tool_s)) / 2
    cycle_s = sampled * (first + slope * batch) + tool_s
    return episodes / max(1e-9, cycle_s * max(1.0, turns) * bounds.members)


def train_s(
    state: Readiness, groups: int, pipeline: Pipeline, split: Split, *, ready: int | None = None, gap_s: float = 0.0
) -> float | None:
    """Of a step of `groups`, `ready` of them (None: all) there when it starts; None before a token was measured."""
    tokens, each = state.group_tokens.value, state.costs.get("train_token")
    if not tokens or each is None or each.value is None:
        return None
    per_group = max(1, math.ceil(_PIECES * split.trainer / groups))
    piece = Piece(
        tokens * state.cost("reference_token", each.value / 3) / per_group,
        tokens * each.value / per_group,
        state.cost("swap", _SWAP_S),
    )
    at = [t for t in arrivals(groups if ready is None else ready, groups, gap_s) for _ in range(per_group)]
    return predict_s(pipeline, at, piece, split.trainer, split.reference)


def step_s(state: Readiness, bounds: Bounds, groups: int, pipeline: Pipeline, split: Split) -> float | None:
    """A step in the long run: the slower of generation and training where they overlap, both where they do not."""
    rate, train = groups_per_s(state, bounds, split.rollout), train_s(state, groups, pipeline, split)
    if not rate or train is None:
        return None
    train += state.cost("sync", 0.0)
    if bounds.bound == 0 and pipeline != "streaming":
        return groups / rate + train
    return max(groups / rate, train)
