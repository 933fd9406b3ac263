"""Where episodes play, live: seats that move and wait, and news of turns that comes late, early or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from springtide.engine.protocol import Generation, Sampling
from springtide.rollout import seat as seats
from springtide.rollout.places import Attempt, Places, Told
from springtide.rollout.seat import Seat
from springtide.schedule.events import (
    Action,
    Admitted,
    Dropped,
    Event,
    Finished,
    Pause,
    Paused,
    RankJoined,
    RankLeft,
    Restarted,
    Resume,
    Resumed,
    Returned,
    Route,
    TurnEnded,
)
from springtide.schedule.readiness import Readiness
from springtide.wire import ConnectionLost

IDS, SAMPLING = np.arange(3, dtype=np.int32), Sampling(seed=5, turn=0, max_new_tokens=4)


# --- seats ------------------------------------------------------------------------------------------------------------


class Voice:
    """An engine and the way to it. dies: so many of its next turns are lost with it."""

    def __init__(self, dies: int = 0) -> None:
        self.up, self.dies = True, dies
        self.turns: list[tuple[str, Sampling]] = []
        self.released: list[str] = []

    async def client(self) -> Voice:
        while not self.up:
            await asyncio.sleep(0.001)
        return self

    async def generate(self, session: str, ids: np.ndarray, sampling: Sampling, **_: Any) -> Generation:
        self.turns.append((session, sampling))
        if self.dies:
            self.dies -= 1
            raise ConnectionLost("engine went away")
        return Generation(ids, np.zeros(len(ids), np.float32), 0, "stop")

    async def release(self, session: str) -> None:
        self.released.append(session)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_turn_whose_engine_dies_is_sampled_anew_where_the_episode_is_placed_next() -> None:
    """The whole episode was played again, with its environment, although a turn depends on its seed alone."""

    async def test() -> None:
        first, second = Voice(dies=1), Voice()
        seat = Seat({"a": first, "b": second}, "a", tell=lambda what, context: None)
        turn = asyncio.ensure_future(seat.generate("s", IDS, SAMPLING))
        await asyncio.sleep(0.02)
        assert not turn.done() and len(first.turns) == 1
        seat.move("b")
        generation = await turn
        assert second.turns == first.turns == [("s", SAMPLING)]
        assert seat.tokens == len(generation.ids)

    run(test)


def test_a_move_that_comes_before_the_loss_is_noticed_counts() -> None:
    async def test() -> None:
        first, second = Voice(), Voice()
        lost = asyncio.Event()

        async def generate(*_: Any, **__: Any) -> Generation:
            await lost.wait()
            raise ConnectionLost("engine went away")

        first.generate = generate  # type: ignore[method-assign]
        seat = Seat({"a": first, "b": second}, "a", tell=lambda what, context: None)
        turn = asyncio.ensure_future(seat.generate("s", IDS, SAMPLING))
        await asyncio.sleep(0)
        seat.move("b")
        lost.set()
        await turn
        assert len(second.turns) == 1

    run(test)


def test_nobody_is_waited_for_by_an_episode_that_nobody_schedules_nor_for_ever() -> None:
    async def test() -> None:
        with pytest.raises(ConnectionLost):
            await Seat({"a": Voice(dies=1)}, "a").generate("s", IDS, SAMPLING)
        voice = Voice(dies=99)
        seat = Seat({"a": voice}, "a", tell=lambda what, context: None)
        turn = asyncio.ensure_future(seat.generate("s", IDS, SAMPLING))
        while not turn.done():
            await asyncio.sleep(0.005)
            seat.move("a")
        with pytest.raises(ConnectionLost):
            turn.result()
        assert len(voice.turns) == seats._LOSSES

    run(test)


def test_a_paused_episode_waits_after_its_tool_answered_and_moves_with_its_kv_given_up() -> None:
    async def test() -> None:
        first, second, told = Voice(), Voice(), list[Any]()
        seat = Seat({"a": first, "b": second}, "a", tell=lambda *what: told.append(what))
        await seat.returned(3)
        await seat.generate("s", IDS, SAMPLING)
        seat.turn_ended(6)
        seat.move(None)
        waits = asyncio.ensure_future(seat.returned(9))
        await asyncio.sleep(0.02)
        assert told == [("returned", 3), ("turn", 6), ("returned", 9)] and not waits.done()
        seat.move("b")
        await waits
        await seat.generate("s", IDS, SAMPLING)
        assert first.released == ["s"] and len(second.turns) == 1
        await seat.release("s")
        assert second.released == ["s"]

    run(test)


def test_an_episode_whose_engine_is_down_goes_to_another_as_soon_as_it_is_told() -> None:
    async def test() -> None:
        first, second = Voice(), Voice()
        first.up = False
        seat = Seat({"a": first, "b": second}, "a", tell=lambda what, context: None)
        turn = asyncio.ensure_future(seat.generate("s", IDS, SAMPLING))
        await asyncio.sleep(0.02)
        seat.move("b")
        await turn
        assert not first.turns and len(second.turns) == 1
        nowhere = Seat({"a": second}, None, tell=lambda what, context: None)
        turn = asyncio.ensure_future(nowhere.generate("s", IDS, SAMPLING))
        await asyncio.sleep(0.02)
        assert not turn.done()
        nowhere.move("a")
        await turn

    run(test)


# --- places -----------------------------------------------------------------------------------------------------------


class Moved:
    """A rollout worker: what it was told."""

    def __init__(self) -> None:
        self.moves: list[tuple[int, str | None]] = []

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        assert method == "move"
        self.moves += payload["moves"]


class Floor:
    """Readiness and places, with the events that were applied; no policy: the test decides."""

    def __init__(self, members: int = 1) -> None:
        self.state, self.events = Readiness({"s": 1.0}), list[Event]()
        self.places, self.worker = Places(self.state, self.apply), Moved()
        for rank in ("a", "b"):
            self.apply(RankJoined(0.0, rank, "rollout", 1000))
        self.apply(Admitted(0.0, 0, "s", 0, members))

    def apply(self, *events: Event) -> None:
        for event in events:
            self.state.apply(event)
            self.events.append(event)

    def do(self, *actions: Action) -> None:
        for action in actions:
            assert self.state.invalid(action) is None
            self.places.carry_out(action)

    def phase(self) -> Any:
        episode = self.state.episode(0, 0)
        assert episode is not None
        return episode.phase, episode.rank, episode.parked

    def tell(self, attempt: Attempt, *news: tuple[str, int]) -> None:
        told: list[Told] = [(attempt.ticket, what, 1.0, context) for what, context in news]  # type: ignore[misc]
        self.places.heard(told)


def test_an_attempt_waits_for_its_place_and_its_turns_are_heard_in_order() -> None:
    async def test() -> None:
        floor = Floor()
        entered = asyncio.Event()

        async def play() -> None:
            async with floor.places.attempt(0, 0, floor.worker) as attempt:
                entered.set()
                floor.tell(attempt, ("returned", 5), ("turn", 9), ("returned", 12), ("turn", 20))

        playing = asyncio.ensure_future(play())
        await asyncio.sleep(0.01)
        assert not entered.is_set()
        floor.do(Route(0, 0, "b"))
        await playing
        turns = [e for e in floor.events if isinstance(e, (TurnEnded, Returned))]
        assert [type(e).__name__[0] + str(e.context) for e in turns] == ["T0", "R5", "T9", "R12", "T20"]
        assert floor.phase() == ("acting", "b", False)

    run(test)


def test_news_of_an_attempt_that_is_over_changes_nothing_and_is_counted() -> None:
    """A group that was dropped heard of its turns afterwards, and the state refused them: the run ended."""

    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"))
        async with floor.places.attempt(0, 0, floor.worker) as attempt:
            floor.apply(Dropped(0.0, 0, "deadline"))
            before = len(floor.events)
            floor.tell(attempt, ("returned", 5))
        floor.tell(attempt, ("turn", 9))
        assert len(floor.events) == before and floor.places.ignored["late"] == 1

    run(test)


def test_an_answer_that_comes_when_its_group_is_given_up_is_no_event() -> None:
    """The run ended: the answer was on the way when the group was dropped, and its end contradicted the state."""

    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"))

        class Answers(Moved):
            async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
                floor.apply(Dropped(0.0, 0, "run_ended"))
                return SimpleNamespace(cause=None), ()

        async with floor.places.attempt(0, 0, Answers()) as attempt:
            await floor.places.play(attempt, None, deadline_s=1.0)  # type: ignore[arg-type]
        assert not any(isinstance(event, Finished) for event in floor.events)
        floor.places.finished(0, 0, False)

    run(test)


def test_an_episode_that_outran_its_pause_is_heard_again_once_it_is_resumed() -> None:
    """It decoded on while the state had it parked; its turn's end contradicted that."""

    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"))
        async with floor.places.attempt(0, 0, floor.worker) as attempt:
            floor.tell(attempt, ("returned", 5), ("turn", 9))
            floor.do(Pause(0, 0))
            floor.tell(attempt, ("returned", 12), ("turn", 20), ("returned", 25))  # the pause came too late
            assert floor.phase() == ("returned", "a", True)
            floor.do(Resume(0, 0, "b"))
            assert floor.phase() == ("decoding", "b", False)
            episode = floor.state.episode(0, 0)
            assert episode is not None and episode.context == 25
            await asyncio.sleep(0.01)
            assert floor.worker.moves == [(attempt.ticket, "b")]  # the last word counts

    run(test)


def test_an_episode_whose_rank_died_is_told_where_to_go_on_and_what_it_did_meanwhile_is_heard_then() -> None:
    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"))
        async with floor.places.attempt(0, 0, floor.worker) as attempt:
            floor.tell(attempt, ("returned", 5))
            floor.apply(RankLeft(0.0, "a"))
            floor.tell(attempt, ("turn", 9))  # it ended just before
            assert floor.phase()[0] == "waiting"
            floor.do(Route(0, 0, "b"))
            assert floor.phase() == ("acting", "b", False)
            await asyncio.sleep(0.01)
            assert floor.worker.moves == [(attempt.ticket, "b")]

    run(test)


@pytest.mark.parametrize("context", [-5, 1 << 60])
def test_a_context_that_cannot_be_is_counted_and_the_turn_did_end(context: int) -> None:
    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"))
        async with floor.places.attempt(0, 0, floor.worker) as attempt:
            floor.tell(attempt, ("returned", 5), ("turn", context), ("returned", 12))
            assert floor.phase() == ("decoding", "a", False)
            assert floor.places.ignored["nonsense"] == 1

    run(test)


def test_a_group_whose_worker_died_waits_for_places_again_with_what_was_over_of_it() -> None:
    """A dead worker's group is played again, but `Placed` of a member that was over was refused."""

    async def test() -> None:
        floor = Floor(members=2)
        floor.do(Route(0, 0, "a"), Route(0, 1, "b"))
        async with floor.places.attempt(0, 0, floor.worker):
            floor.apply(Finished(0.0, 0, 0, True))
        floor.apply(Restarted(0.0, 0))
        assert list(floor.state.waiting) == [(0, 0), (0, 1)] and floor.state.alive == 2
        assert not any(rank.live for rank in floor.state.ranks.values())
        floor.do(Route(0, 0, "a"))
        async with floor.places.attempt(0, 0, floor.worker):
            pass

    run(test)


def test_an_attempt_that_is_paused_before_its_worker_hears_of_it_starts_paused() -> None:
    async def test() -> None:
        floor = Floor()
        floor.do(Route(0, 0, "a"), Pause(0, 0))
        asked: dict[str, Any] = {}

        class Asked(Moved):
            async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
                asked.update(payload)
                raise ConnectionLost("enough")

        async with floor.places.attempt(0, 0, Asked()) as attempt:
            with pytest.raises(ConnectionLost):
                await floor.places.play(attempt, None, deadline_s=1.0)  # type: ignore[arg-type]
        assert (asked["rank"], asked["parked"]) == ("a", True)
        assert [type(e) for e in floor.events[-2:]] == [TurnEnded, Paused]
        floor.do(Resume(0, 0, "b"))
        assert isinstance(floor.events[-1], Resumed)

    run(test)


def test_an_evaluation_has_numbers_of_its_own() -> None:
    """Its visits are counted from 0, as training's are: both were in flight under one number."""

    async def test() -> None:
        floor = Floor()
        for _ in range(2):
            async with asyncio.timeout(1):
                waits = asyncio.ensure_future(evaluated(floor))
                await asyncio.sleep(0.01)
                (visit,) = floor.state.evaluations
                floor.do(Route(visit, 0, "a"))
                await waits
        assert not floor.state.evaluations and list(floor.state.playing) == [0]
        assert [e.visit for e in floor.events if isinstance(e, Dropped)] == [-1, -2]

    async def evaluated(floor: Floor) -> None:
        async with floor.places.evaluation("another suite", floor.worker):
            pass

    run(test)
