"""The barrier of a synchronous run: nobody is waited for who will not come."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from springtide.engine.protocol import Generation, Sampling
from springtide.rollout.worker import Worker

Episode = tuple[str, int, int]


class Voice:
    """An engine that answers at once, and the way to it; `batches` are the sessions that were generated together."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, ...]] = []

    async def client(self) -> Voice:
        return self

    async def generate_many(self, requests: tuple[dict[str, Any], ...]) -> tuple[Generation, ...]:
        self.batches.append(tuple(request["session"] for request in requests))
        return tuple(Generation(np.full(1, 40, np.int32), np.zeros(1, np.float32), 0, "stop") for _ in requests)


def synchronous() -> tuple[Voice, Worker]:
    voice: Any = Voice()
    nothing: Any = None  # no episode is played: its turns are taken here
    return voice, Worker(nothing, nothing, {"engine-0": voice}, lockstep=True)


async def turn(worker: Worker, episode: Episode) -> None:
    assert worker._lockstep is not None
    async with worker._lockstep.player(episode) as engine:
        await engine.generate("/".join(map(str, episode)), np.zeros(3, np.int32), Sampling(0, 0, 5))


async def turns(worker: Worker, *episodes: Episode) -> asyncio.Future[Any]:
    """Take a turn of each, and look whether they wait."""
    taken = asyncio.gather(*(turn(worker, episode) for episode in episodes))
    await asyncio.sleep(0.05)
    return taken


def test_episodes_that_a_given_up_group_announced_are_not_waited_for() -> None:
    """A group at its deadline left the count of announced episodes too high, and no turn was generated any more."""

    async def run() -> None:
        voice, worker = synchronous()
        worker.expect("train", (0, 1), 2)
        taken = await turns(worker, ("train", 0, 0), ("train", 0, 1))
        assert not taken.done()
        worker.discard("train", 1, ())
        async with asyncio.timeout(5):
            await taken
        assert voice.batches == [("train/0/0", "train/0/1")]

    asyncio.run(run())


def test_what_an_older_wave_announced_is_not_waited_for_in_a_newer() -> None:
    """The evaluation at the end of a run waited for members that its last wave never started."""

    async def run() -> None:
        voice, worker = synchronous()
        worker.expect("train", (0,), 2)
        worker.expect("eval", (0, 1), 1)
        async with asyncio.timeout(5):
            await (await turns(worker, ("eval", 1, 0), ("eval", 0, 0)))
        assert voice.batches == [("eval/0/0", "eval/1/0")]

    asyncio.run(run())


def test_an_episode_that_is_played_again_is_not_taken_for_one_that_has_yet_to_start() -> None:
    async def run() -> None:
        voice, worker = synchronous()
        worker.expect("eval", (0, 1), 1)
        assert worker._lockstep is not None
        async with worker._lockstep.player(("eval", 0, 0)):
            pass  # its environment failed
        again = await turns(worker, ("eval", 0, 0))
        assert not again.done()
        async with asyncio.timeout(5):
            await asyncio.gather(again, turn(worker, ("eval", 1, 0)))
        assert voice.batches == [("eval/0/0", "eval/1/0")]

    asyncio.run(run())
