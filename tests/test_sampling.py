"""Samplers: what they promise over any order of draws and outcomes, their weights, and what a learner gets of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.schedule.sampling import SAMPLERS, DifficultySampler, FrontierSampler, Rules, Sampler, updated
from springtide.schedule.sampling.prefilter import keep
from springtide.trace import TaskRef

ADAPTIVE = [kind for kind in SAMPLERS if kind != "uniform"]
# What happens next: a draw, or the end of one in flight: which of them, and how many of its four members won (None:
# each was lost to its environment).
STEPS = st.lists(st.none() | st.tuples(st.integers(0, 99), st.none() | st.integers(0, 4)), max_size=80)


def tasks(n: int) -> list[TaskRef]:
    return [TaskRef(f"t{i}", "s", "1", "train", "quick", i, i) for i in range(n)]


def make(kind: str, n: int, *, rates: dict[str, float] | None = None, seed: int = 3, **rules: float) -> Sampler:
    return SAMPLERS[kind]("s", tasks(n), seed, Rules(**{"batch": 2, **rules}), rates)  # type: ignore[arg-type]


class Player:
    """Draws and ends visits, and keeps what a ledger would."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.next = sampler, 0
        self.flying: dict[int, str] = {}
        self.drawn: list[str] = []
        self.outcomes: list[tuple[str, tuple[int, int]]] = []

    def draw(self) -> str:
        task = self.sampler.task(self.next).id
        self.flying[self.next] = task
        self.drawn.append(task)
        self.next += 1
        return task

    def end(self, draw: int, wins: int | None, played: int = 4) -> None:
        task = self.flying.pop(draw)
        if self.sampler.ended(draw, wins or 0, 0 if wins is None else played) is not None:
            assert wins is not None
            self.outcomes.append((task, (wins, played)))

    def follow(self, steps: list[tuple[int, int | None] | None], most: int) -> None:
        for step in steps:
            if step is None and len(self.flying) < most:
                self.draw()
            elif step is not None and self.flying:
                self.end(sorted(self.flying)[step[0] % len(self.flying)], step[1])

    def resumed(self, fresh: Sampler) -> Player:
        """As the driver does it: newest draws, outcomes in order, what is open."""
        other = Player(fresh)
        for draw, task in enumerate(self.drawn):
            fresh.restore(task, draw=draw)
        for task, outcome in self.outcomes:
            fresh.restore(task, outcome=outcome)
        for draw, task in self.flying.items():
            fresh.resume(draw, task)
        other.next, other.flying, other.drawn = self.next, dict(self.flying), list(self.drawn)
        return other


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ADAPTIVE)
@given(steps=STEPS, cooldown=st.integers(0, 9), retire=st.integers(0, 3), n=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_no_task_is_drawn_while_it_plays(
    kind: str, steps: list[tuple[int, int | None] | None], cooldown: int, retire: int, n: int
) -> None:
    player = Player(make(kind, n, cooldown=cooldown, retire_after=retire))
    for step in steps:
        before = set(player.flying.values())
        drawn = len(player.drawn)
        player.follow([step], most=n)
        if len(player.drawn) > drawn:
            assert player.drawn[-1] not in before
        assert player.sampler.in_flight == set(player.flying.values())
    if len(player.flying) < n:
        player.draw()  # whatever cools down or is retired, there is always one


@pytest.mark.parametrize("kind", list(SAMPLERS))
@given(steps=STEPS, cut=st.integers(0, 80), after=STEPS)
@settings(max_examples=30, deadline=None)
def test_a_resumed_run_draws_as_an_undisturbed_one_given_the_same_outcomes(
    kind: str, steps: list[tuple[int, int | None] | None], cut: int, after: list[tuple[int, int | None] | None]
) -> None:
    player = Player(make(kind, 9, cooldown=3, retire_after=2))
    player.follow(steps[:cut], most=6)
    other = player.resumed(make(kind, 9, cooldown=3, retire_after=2))
    for one in (player, other):
        one.follow(after, most=6)
        one.follow([None] * 6, most=6)
    assert player.drawn == other.drawn


@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_an_environment_error_changes_nothing(kind: str) -> None:
    """A task whose environment is down is not a hard task: capability and draws are as if it had never played."""
    drawn = []
    for broken in (False, True):
        player = Player(make(kind, 12, cooldown=0, retire_after=1))
        for draw in range(40):
            task = player.draw()
            wins = None if broken else 2
            if broken:
                player.end(draw, wins)
                assert player.sampler.capability(task) == 0.5
            else:
                player.flying.pop(draw)
                player.sampler.ended(draw, 0, 0)
        drawn.append(player.drawn)
        assert player.outcomes == []
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_every_task_is_reached_however_hopeless(kind: str) -> None:
    rates = {f"t{i}": 0.5 if i < 8 else i % 2 for i in range(24)}
    player = Player(make(kind, 24, rates=rates))
    for draw in range(1500):
        i = int(player.draw()[1:])
        player.end(draw, 2 if i < 8 else 4 * (i % 2))
    assert set(player.drawn) == {f"t{i}" for i in range(24)}


@pytest.mark.parametrize("kind", ADAPTIVE)
@given(seed=st.integers(0, 99), cooldown=st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_a_task_cools_down_for_as_many_draws_of_its_suite(kind: str, seed: int, cooldown: int) -> None:
    player = Player(make(kind, 9, seed=seed, cooldown=cooldown))
    last: dict[str, int] = {}
    for draw in range(60):
        task = player.draw()
        player.end(draw, 2)
        assert draw - last.get(task, -99) > cooldown
        last[task] = draw


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_a_task_is_retired_after_visits_alike_and_one_mixed_group_begins_the_count_anew(kind: str) -> None:
    player = Player(make(kind, 10, retire_after=3))
    alike: Counter[str] = Counter()
    for draw in range(200):
        task = player.draw()
        i = int(task[1:])
        assert alike[task] < 3, f"{task} was retired"
        visits = player.drawn.count(task)
        wins = (0, 4)[i % 2] if i < 6 else (2 if visits % 3 == 0 else 0)
        player.end(draw, wins)
        alike[task] = alike[task] + 1 if wins in (0, 4) else 0
    assert set(player.drawn[-50:]) <= {"t6", "t7", "t8", "t9"}


def test_retired_tasks_come_again_where_nothing_else_is_left() -> None:
    player = Player(make("frontier", 3, retire_after=1))
    for draw in range(12):
        player.draw()
        player.end(draw, 0)
    assert set(player.drawn) == {"t0", "t1", "t2"}


# --- weights, by hand (the table of reference 2.1) --------------------------------------------------------------------

P = (0.0, 0.05, 0.1, 0.125, 0.2, 0.25, 0.375, 0.5)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (FrontierSampler, (0.135, 0.198, 0.278, 0.325, 0.487, 0.607, 0.882, 1.0)),
        (DifficultySampler, (0.0, 0.19, 0.36, 0.438, 0.64, 0.75, 0.938, 1.0)),
    ],
)
def test_weights_are_the_published_ones(sampler: type[Sampler], expected: tuple[float, ...]) -> None:
    for mirrored in (False, True):
        rates = {f"t{i}": 1 - p if mirrored else p for i, p in enumerate(P)}
        weights = sampler("s", tasks(len(P)), 0, Rules(), rates).weights()  # type: ignore[attr-defined]
        assert weights == pytest.approx(expected, abs=6e-4)


def test_capability_is_the_published_mean() -> None:
    sampler = make("uniform", 1)
    sampler.task(0)
    assert sampler.ended(0, 1, 8) == pytest.approx(0.8 * 0.5 + 0.2 / 8)
    p = 0.5
    for _ in range(8):  # "falling from .5 to < .1 takes 8 all-fail visits"
        assert p > 0.1
        p = updated(p, 0, 8, 0.2)
    assert p < 0.1


def test_the_frontier_is_the_3b_best_and_a_fifth_comes_from_outside_it() -> None:
    """60 tasks at 0.5 + i/120: with B = 4 the first 12 are the candidates, and draws 4, 9, 14, ... fall outside."""
    rates = {f"t{i}": 0.5 + i / 120 for i in range(60)}
    inside: Counter[int] = Counter()
    sampler = make("frontier", 60, rates=rates, batch=4)
    for draw in range(4000):
        place = int(sampler.task(draw).id[1:])
        assert (place >= 12) == (draw % 5 == 4)
        sampler.ended(draw, 0, 0)
        inside[place] += place < 12
    weights = np.exp(-((np.arange(12) / 120) ** 2) / (2 * 0.25**2))
    shares = np.array([inside[i] for i in range(12)]) / inside.total()
    assert shares == pytest.approx(weights / weights.sum(), abs=0.03)


def test_a_batch_drawn_at_once_is_without_replacement_from_one_frontier() -> None:
    rates = {f"t{i}": 0.5 if i < 12 else 0.0 for i in range(60)}
    sampler = make("frontier", 60, rates=rates, batch=4)
    batch = [int(sampler.task(draw).id[1:]) for draw in range(10)]  # two outside, eight inside
    assert sorted(place >= 12 for place in batch) == [False] * 8 + [True] * 2
    assert len(set(batch)) == 10


def test_ties_at_the_frontiers_edge_are_broken_anew_each_batch() -> None:
    sampler = make("frontier", 100, explore=0.0)
    seen = set()
    for draw in range(400):
        seen.add(sampler.task(draw).id)
        sampler.ended(draw, 0, 0)
    assert len(seen) > 90  # of 100 equal tasks; one order for ever would show 6


def test_thompson_seeks_the_centre_and_tries_what_it_knows_little_of() -> None:
    sampler = make("thompson", 3, explore=0.0)
    player = Player(sampler)
    for draw in range(300):
        player.end(draw, (0, 2, 4)[int(player.draw()[1:])])
    count = Counter(player.drawn)
    assert count["t1"] > 200
    assert min(count.values()) > 1  # one visit's four failures say little of a task


def test_the_prefilter_keeps_measured_tasks_within_the_bounds_both_included() -> None:
    rates = {"t0": 0.0, "t1": 0.1, "t2": 0.5, "t3": 0.9, "t4": 1.0}
    assert [t.id for t in keep(tasks(6), rates, 0.1, 0.9)] == ["t1", "t2", "t3"]


# --- what it is for ---------------------------------------------------------------------------------------------------


def mixed_share(kind: str, seed: int, chance: Callable[[int], float], n: int = 80, draws: int = 1200) -> float:
    """Share of groups of 8 with both outcomes, of the second half of the draws; 16 groups in flight."""
    player = Player(SAMPLERS[kind]("s", tasks(n), seed, Rules(batch=16)))
    luck = random.Random(seed)
    mixed = []
    for draw in range(draws):
        player.draw()
        if draw >= 16:
            wins = sum(luck.random() < chance(int(player.flying[draw - 16][1:])) for _ in range(8))
            mixed.append(0 < wins < 8)
            player.end(draw - 16, wins, 8)
    return sum(mixed[len(mixed) // 2 :]) / (len(mixed) - len(mixed) // 2)


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_on_a_pool_of_wide_spread_more_groups_are_mixed_than_under_uniform(kind: str) -> None:
    """A quarter of the tasks between 0.2 and 0.8, the rest hopeless or mastered."""

    def chance(i: int) -> float:
        return 0.2 + 0.6 * (i % 40) / 40 if i % 4 == 0 else (0.005, 0.995)[i % 2]

    # Soft weights without a cut, as 4p(1-p) has, still visit what they should not: most tasks are of that kind.
    ahead = 0.1 if kind == "difficulty" else 0.2
    for seed in range(2):
        assert mixed_share(kind, seed, chance) > mixed_share("uniform", seed, chance) + ahead
