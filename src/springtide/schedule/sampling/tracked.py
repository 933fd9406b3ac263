"""What every sampler knows of its tasks: capability, what is in flight, what cools down, what is retired.

Owns: a suite's capabilities and draws in flight. Invariants: a task in flight is not drawn again; a visit without a
scored member changes nothing but that it ends; the same draws and outcomes in the same order give the same state, so a
resumed run tells them again and goes on as if undisturbed. A draw depends on seed, suite, its number and that state.
Called by: the samplers beside it; the feeder, through `rollout.draws`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from springtide.trace import TaskRef

UNKNOWN = 0.5  # capability on a task nobody has played: its outcome could not be less known
_NEVER = -(10**18)


@dataclass(frozen=True, slots=True)
class Rules:
    """batch: tasks of a step (B). candidates: the frontier's size, in batches. explore: share drawn from elsewhere.

    The defaults are SCALECUA's (reference 2.1): EMA 0.2, a Gaussian of width 0.25 at 0.5, 3B candidates, 20%, B = 32.
    cooldown: draws of the suite before a task may come again. retire_after: visits in a row whose members all won, or
    all failed, after which it comes no more; 0: never.
    """

    batch: int = 32
    ema: float = 0.2
    centre: float = 0.5
    width: float = 0.25
    candidates: int = 3
    explore: float = 0.2
    cooldown: int = 0
    retire_after: int = 0


def updated(p: float, wins: int, played: int, ema: float) -> float:
    """`p <- (1 - a) p + a wins/played` (reference 2.1); without a scored member, `p`."""
    return p if played == 0 else (1 - ema) * p + ema * wins / played


class Sampler(ABC):
    """One suite's draws. `rates`: task id -> pass rate measured before, where its capability begins."""

    def __init__(
        self,
        suite: str,
        tasks: Sequence[TaskRef],
        seed: int,
        rules: Rules | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        if not tasks:
            raise ValueError(f"suite {suite} has no tasks to draw")
        self._suite, self._tasks, self._seed, self._rules = suite, tasks, seed, rules or Rules()
        self._index = {task.id: i for i, task in enumerate(tasks)}
        self._p = np.array([(rates or {}).get(task.id, UNKNOWN) for task in tasks])  # float64 [tasks]
        self._alike = np.zeros(len(tasks), np.int64)  # visits in a row whose members all won (> 0) or all failed (< 0)
        self._drawn = np.full(len(tasks), _NEVER, np.int64)  # the newest draw
        self._flying: dict[int, int] = {}  # draw -> its task's place

    # --- draws ------------------------------------------------------------------------------------------------------

    def task(self, draw: int) -> TaskRef:
        """Draw the `draw`-th task (from 0); it is in flight until it `ended` or is `released`."""
        place = self._choose(draw)
        self._fly(draw, place)
        return self._tasks[place]

    def resume(self, draw: int, task: str) -> None:
        """Draw `draw` was made before a restart and is still played."""
        if (place := self._index.get(task)) is not None:
            self._fly(draw, place)

    def restore(self, task: str, *, draw: int | None = None, outcome: tuple[int, int] | None = None) -> None:
        """What the ledger knows of a task: its newest draw, or the next of its outcomes (wins, played)."""
        if (place := self._index.get(task)) is None:
            return  # left out by now: of another catalogue or by another prefilter
        if draw is not None:
            self._drawn[place] = max(self._drawn[place], draw)
        if outcome is not None:
            self._learn(place, *outcome)

    def ended(self, draw: int, wins: int, played: int) -> float | None:
        """The draw's visit is over: `wins` of its `played` scored members. Returns the new capability, None without."""
        place = self._flying.pop(draw, None)
        if place is None or played == 0:
            return None
        self._learn(place, wins, played)
        return float(self._p[place])

    def capability(self, task: str) -> float:
        """The estimate of the policy's success on `task`."""
        return float(self._p[self._index[task]])

    @property
    def in_flight(self) -> set[str]:
        return {self._tasks[place].id for place in self._flying.values()}

    # --- for the samplers -------------------------------------------------------------------------------------------

    @abstractmethod
    def _choose(self, draw: int) -> int:
        """The place of the `draw`-th task."""

    def _free(self, draw: int) -> np.ndarray:
        """bool [tasks]: what may be drawn. Where nothing else is left, cooling tasks come again, then retired ones.

        Raises: ValueError if all are in flight; a run has fewer groups in flight than tasks (`rollout.draws`).
        """
        waiting = np.ones(len(self._tasks), bool)
        waiting[list(self._flying.values())] = False
        rules = self._rules
        warm = draw - self._drawn > rules.cooldown
        active = np.abs(self._alike) < rules.retire_after if rules.retire_after else np.ones_like(warm)
        for allowed in (warm & active, active, np.ones_like(warm)):
            if (free := waiting & allowed).any():
                return free
        raise ValueError(f"suite {self._suite}: all {len(self._tasks)} tasks are in flight")

    def _explores(self, draw: int) -> bool:
        """Whether this draw is one of the `explore` share: evenly spread, every fifth at 0.2."""
        share = self._rules.explore + 1e-12
        return int((draw + 1) * share) > int(draw * share)

    def _random(self, *what: int | str) -> np.random.Generator:
        text = "/".join(str(w) for w in (self._seed, self._suite, *what))
        return np.random.default_rng(random.Random(text).getrandbits(64))

    def _learn(self, place: int, wins: int, played: int) -> None:
        """One visit's outcome enters the task's state."""
        self._p[place] = updated(float(self._p[place]), wins, played, self._rules.ema)
        sign = 1 if wins == played else -1 if wins == 0 else 0
        before = int(self._alike[place])
        self._alike[place] = sign + before if sign * before > 0 else sign

    def _fly(self, draw: int, place: int) -> None:
        self._flying[draw] = place
        self._drawn[place] = max(self._drawn[place], draw)


def choose(weights: np.ndarray, random_: np.random.Generator) -> int:
    """A place in proportion to its weight (float64 [tasks], not all 0)."""
    edges = np.cumsum(weights)
    return int(min(np.searchsorted(edges, random_.random() * edges[-1], side="right"), np.flatnonzero(weights)[-1]))
