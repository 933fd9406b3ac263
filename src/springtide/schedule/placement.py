"""Placement without a budget: an episode goes to the rank with the fewest, and stays there.

Owns: routing as a plain router does it (verl, AReaL, prime-rl: least load at the start, sticky afterwards), evaluation
first. Nothing is paused.
Called by: `registry.py`, for the policies that manage no KV.
"""

from __future__ import annotations

from springtide.schedule.events import Action, Event, Route
from springtide.schedule.parts import Episode
from springtide.schedule.readiness import Readiness


class LeastLoaded:
    """Every waiting episode, at once, to the rank that plays the fewest."""

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        """Nothing is kept between events."""

    def follow(self, state: Readiness) -> None:
        """Nor of what was before."""

    def decide(self, state: Readiness, away: set[str]) -> list[Action]:
        if not state.waiting:
            return []
        load = {rank.name: rank.live for rank in state.rollout_ranks() if rank.name not in away}
        if not load:
            return []
        actions: list[Action] = []
        for episode in sorted(state.waiting.values(), key=lambda e: not e.group.evaluation):
            name = min(load, key=load.__getitem__)
            load[name] += 1
            actions.append(Route(episode.visit, episode.member, name))
        return actions

    def full(self, state: Readiness) -> str | None:
        return None

    def probes(self, state: Readiness, suite: str) -> bool:
        return False
