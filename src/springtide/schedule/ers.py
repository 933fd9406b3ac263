"""Elastic Resource Scaling: at most one rank a step changes its role, at the edge between update and publication.

Owns: the decision, together with the pipeline (`ra2p.py`), as in tiderl_async 1.8.4: predict the step's time for every
split one rank away, each with its best pipeline, and move if

    (T(now) - T(best)) * horizon > switch cost + seconds to prefill again what a leaving rank holds,

with 5% of hysteresis. Donors: reference ranks, rollout ranks, and lendable trainer ranks, so that it works without a
reference. Guards: none while an evaluation is pinned; one at a time; a step's fetch falls towards `bounds.fewest` while
generation lags behind after a rank was taken from it.
`Signals` decides by TideRL's own signals instead (tiderl_async 1.5), where no prediction is made.
Called by: `registry.py`.
"""

from __future__ import annotations

import math

from springtide.schedule.composed import Roles
from springtide.schedule.events import Action, Began, ChoosePipeline, Event, Pipeline, Role, SetFetch
from springtide.schedule.forecast import Split, step_s, train_s
from springtide.schedule.parts import Episode, RankState, Smoothed
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.ra2p import HYSTERESIS, choose
from springtide.schedule.readiness import Readiness

_HORIZON = 3.0  # steps until the next switch, before any was seen
_SWITCH_S = 10.0  # verl's guess
_PREFILL = 20_000.0  # tokens/s, before any was measured: 17k of a 14B, 32k of a 7B model on an H100

Move = tuple[RankState, Role]


class Elastic(Roles):
    """pipelines: those that this run may use; fetch: groups of a step; horizon: steps between switches."""

    def __init__(self, bounds: Bounds, layout: Layout) -> None:
        super().__init__(bounds, layout)
        self.pipelines: tuple[Pipeline, ...] = (
            ("streaming", "aggregate") if layout.pipeline in ("streaming", "aggregate") else (layout.pipeline,)
        )
        self._begin()

    def _begin(self) -> None:
        self.pipeline, self.fetch = self.layout.pipeline, self.bounds.groups
        self.streams = self.pipeline == "streaming"
        self.horizon = Smoothed()
        self.horizon.add(_HORIZON)
        self._chosen_at = self._switched_at = 0

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        super().observe(state, event, touched)
        if isinstance(event, Began):
            self._begin()
            self._chosen_at = self._switched_at = state.step

    def decide(self, state: Readiness) -> list[Action]:
        if self.pipeline == "streaming" and not state.step_running and state.ranks and not state.roles["reference"]:
            self.pipeline, self.streams = "aggregate", False  # its reference ranks died
            return [ChoosePipeline("aggregate")]
        return super().decide(state)

    # --- the decision -------------------------------------------------------------------------------------------------

    def at_edge(self, state: Readiness) -> list[Action]:
        if not state.ranks:
            return []
        move = None if state.evaluating or self.asked else self.move(state)
        actions: list[Action] = []
        split = after(split_of(state), move)
        pipeline = self.choose_pipeline(state, split)
        if pipeline != self.pipeline:
            self.pipeline, self.streams, self._chosen_at = pipeline, pipeline == "streaming", state.step
            actions.append(ChoosePipeline(pipeline))
        if move is not None:
            self.horizon.add(max(1.0, state.step - self._switched_at))
            self._switched_at = state.step
            actions.append(self.ask(state, *move))
        fetch = self.next_fetch(state, move)
        if fetch != self.fetch:
            self.fetch = fetch
            actions.append(SetFetch(fetch))
        return actions

    def moves(self, state: Readiness) -> list[Move]:
        """One rank each that could change, of its kind the one that holds the least."""
        ranks = sorted(state.ranks.values(), key=lambda rank: (rank.tokens, rank.name))
        swapped = self.pipelines != (self.layout.pipeline,)
        found: list[Move] = []
        home = [rank for rank in ranks if rank.role == "trainer"]
        lendable = [rank for rank in home if rank.lendable]
        if lendable and len(home) > 1 and not self.layout.sharded:
            found.append((lendable[0], "rollout"))
        if references := [rank for rank in ranks if rank.role == "reference"]:
            found.append((references[0], "rollout"))
        if state.roles["rollout"] > 1:
            playing = [rank for rank in ranks if rank.role == "rollout"]
            if swapped and (own := [rank for rank in playing if rank.origin != "trainer"]):
                found.append((own[0], "reference"))
            if (lent := [rank for rank in playing if rank.origin == "trainer"]) and not self.layout.sharded:
                found.append((lent[0], "trainer"))
        return found

    def move(self, state: Readiness) -> Move | None:
        """The one that saves the most, if it pays."""
        now = self.best_s(state, split_of(state))
        if now is None:
            return None
        best: tuple[float, Move] | None = None
        for move in self.moves(state):
            time = self.best_s(state, after(split_of(state), move))
            if time is not None and (best is None or time < best[0]):
                best = time, move
        if best is None or best[0] >= now * (1 - HYSTERESIS):
            return None
        rank = best[1][0]
        cost = state.cost("switch", _SWITCH_S)
        if rank.role == "rollout":
            parked = sum(episode.context for episode in rank.parked.values() if episode.phase != "decoding")
            cost += (rank.tokens + parked) / max(1.0, state.cost("prefill_rate", _PREFILL))
        return best[1] if (now - best[0]) * (self.horizon.value or _HORIZON) > cost else None

    def best_s(self, state: Readiness, split: Split) -> float | None:
        """The step's predicted time with the best pipeline there."""
        times = [step_s(state, self.bounds, self.bounds.groups, name, split) for name in self.usable(split)]
        known = [time for time in times if time is not None]
        return min(known, default=None)

    def usable(self, split: Split) -> tuple[Pipeline, ...]:
        return tuple(name for name in self.pipelines if name != "streaming" or split.reference)

    def choose_pipeline(self, state: Readiness, split: Split) -> Pipeline:
        """Of the next step, by what is ready for it and how fast the rest comes."""
        usable = self.usable(split)
        if len(usable) == 1:
            return usable[0]
        ready, gap = len(state.buffer), state.gap_s.value or 0.0
        times = {name: train_s(state, self.fetch, name, split, ready=ready, gap_s=gap) for name in usable}
        known = {name: time for name, time in times.items() if time is not None}
        if len(known) < len(usable):
            return self.pipeline if self.pipeline in usable else usable[0]
        return choose(self.pipeline, known, state.step - self._chosen_at)

    def next_fetch(self, state: Readiness, move: Move | None) -> int:
        """What generation makes in a step, within [fewest, groups]; all of them unless a rank was taken from it."""
        ideal = self.bounds.groups
        fewest = min(ideal, self.bounds.fewest or self.fewest(ideal))
        taken = move is not None and move[0].role == "rollout"
        if fewest == ideal or not (taken or self.fetch < ideal):
            return ideal
        if len(state.buffer) >= ideal:  # it has caught up
            return ideal
        return max(fewest, min(ideal, max(state.made, len(state.buffer))))

    def fewest(self, ideal: int) -> int:
        """Unless the bounds say: steps keep their size, as learning was tuned to it."""
        return ideal


class Signals(Elastic):
    """TideRL's literal rules. Its constants are not published; these are ours: tau 0.5, waiting counts from 10% of a
    step, B_min half of B_ideal."""

    tau, waits = 0.5, 0.1

    def move(self, state: Readiness) -> Move | None:
        step = state.step_s.value
        if not step or self.pipelines == (self.layout.pipeline,):
            return None  # no reference rank to move
        moves = {(rank.role, role): (rank, role) for rank, role in self.moves(state)}
        trainer_waits = (state.train_wait_s.value or 0.0) > self.waits * step
        rollout_waits = (state.rollout_wait_s.value or 0.0) > self.waits * step
        if state.ready_at_start < self.bounds.groups and trainer_waits:  # generation deficit
            return moves.get(("reference", "rollout"))
        oldest = next(iter(state.buffer.values()), None)
        waits_long = oldest is not None and state.now - oldest.since > self.tau * step
        if (waits_long or state.ready_at_start >= self._break_even(state)) and rollout_waits:  # consumption deficit
            return moves.get(("rollout", "reference"))
        return None

    def choose_pipeline(self, state: Readiness, split: Split) -> Pipeline:
        usable = self.usable(split)
        if len(usable) == 1:
            return usable[0]
        return "streaming" if state.ready_at_start >= self._break_even(state) else super().choose_pipeline(state, split)

    def _break_even(self, state: Readiness) -> float:
        """Groups ready at start from which streaming through one reference rank is the faster."""
        split, gap = split_of(state), state.gap_s.value or 0.0
        split = Split(split.rollout, max(1, split.reference), split.trainer)
        for ready in range(self.bounds.groups + 1):
            times = [
                train_s(state, self.bounds.groups, name, split, ready=ready, gap_s=gap)
                for name in ("streaming", "aggregate")
            ]
            if times[0] is not None and times[1] is not None and times[0] <= times[1]:
                return ready
        return math.inf

    def fewest(self, ideal: int) -> int:
        return math.ceil(ideal / 2)


def split_of(state: Readiness) -> Split:
    return Split(state.roles["rollout"], state.roles["reference"], state.roles["trainer"])


def after(split: Split, move: Move | None) -> Split:
    if move is None:
        return split
    counts: dict[Role, int] = {
        "rollout": split.rollout, "reference": split.reference, "trainer": split.trainer
    }  # fmt: skip
    counts[move[0].role] -= 1
    counts[move[1]] += 1
    return Split(counts["rollout"], counts["reference"], counts["trainer"])
