"""The rollout worker process: it plays episodes, and keeps their trajectories until the driver seals their group.

Owns: the trajectories of finished members, in memory, until `seal` writes the group's file or `discard` forgets them.
Invariants: it never imports torch; tokens go from here to a file, never to the driver; an episode is answered exactly
once, with a summary.
Called by: the driver, over the wire (`springtide.rollout.worker:main`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from springtide.chat import Chat, load_chat
from springtide.engine.client import EngineClient
from springtide.engine.protocol import Engine, EngineError, Generation, Sampling
from springtide.env.local import LocalClient
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary, play, summarise
from springtide.rollout.places import Told
from springtide.rollout.seat import EngineLink, Seat
from springtide.trace import Group, Trajectory
from springtide.wire import Peer, serve

_GATHER_S = 0.02  # what happens within it is told together: the driver decides some 50 times a second at most


class Worker:
    """Plays episodes over one environment client and one or more engines."""

    def __init__(
        self,
        chat: Chat,
        env: LocalClient,
        engines: Mapping[str, EngineLink],
        *,
        lockstep: bool,
        stale: EngineLink | None = None,
    ) -> None:
        """engines: by rank. stale: the stale pool's engine, where those of `engines` hold one version only."""
        self._chat, self._env, self._engines, self._stale = chat, env, engines, stale
        self._lockstep = Lockstep(next(iter(engines.values()))) if lockstep else None
        self._finished: dict[tuple[str, int], dict[int, Trajectory]] = {}
        self._playing: dict[tuple[str, int], dict[asyncio.Task[Any], Seat]] = {}
        self._seats: dict[int, Seat] = {}  # of the episodes that the driver schedules, by ticket
        self._news: list[Told] = []
        self._told = asyncio.Event()

    async def episode(
        self, spec: EpisodeSpec, *, ticket: int | None = None, rank: str | None = None, parked: bool = False
    ) -> tuple[EpisodeSummary, tuple[Told, ...]]:
        """Play it; its summary, and what was not told yet of anybody's turns.

        ticket: whom the driver moves and hears of, from `rank` on; None: it stays at one engine, unscheduled.
        """
        task = asyncio.current_task()
        assert task is not None
        playing = self._playing.setdefault((spec.purpose, spec.visit), {})
        try:
            async with self._seated(spec, ticket, rank, parked) as seat:
                playing[task] = seat
                trajectory = await play(spec, self._env, cast(Engine, seat), self._chat, seat)
        finally:
            playing.pop(task, None)
            if not playing and self._playing.get((spec.purpose, spec.visit)) is playing:
                del self._playing[spec.purpose, spec.visit]
        if not trajectory.outcome.failed_environment:
            self._finished.setdefault((spec.purpose, spec.visit), {})[spec.member] = trajectory
        return summarise(trajectory, generated=seat.tokens), self._drain()

    @contextlib.asynccontextmanager
    async def _seated(
        self, spec: EpisodeSpec, ticket: int | None, rank: str | None, parked: bool
    ) -> AsyncIterator[Seat]:
        links: Mapping[str, Any] = self._engines
        async with contextlib.AsyncExitStack() as stack:
            if self._lockstep is not None:
                player = self._lockstep.player((spec.purpose, spec.visit, spec.member))
                links = dict.fromkeys(links, await stack.enter_async_context(player))
            if ticket is None:
                rank = list(links)[spec.visit % len(links)]  # a group shares its prefix, so it shares the engine
            version = spec.stale_version
            stale = (self._stale, version) if self._stale is not None and version is not None else None
            tell = functools.partial(self._tell, ticket) if ticket is not None else None
            seat = Seat(links, rank, tell=tell, parked=parked, stale=stale)
            if ticket is not None:
                self._seats[ticket] = seat
                stack.callback(self._seats.pop, ticket)
            yield seat

    def _tell(self, ticket: int, what: Literal["turn", "returned"], context: int) -> None:
        self._news.append((ticket, what, time.time(), context))
        self._told.set()

    def _drain(self) -> tuple[Told, ...]:
        news, self._news = tuple(self._news), []
        self._told.clear()
        return news

    async def turns(self, wait_s: float) -> tuple[Told, ...]:
        """What happened since it was asked last: once anything has, or nothing after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._told.wait()
        await asyncio.sleep(_GATHER_S)
        return self._drain()

    def move(self, moves: tuple[tuple[int, str | None], ...]) -> None:
        """Each (ticket, rank) goes on at that rank; None: it waits at its next tool boundary."""
        for ticket, rank in moves:
            if (seat := self._seats.get(ticket)) is not None:  # else it is over
                seat.move(rank)

    async def seal(self, purpose: str, visit: int, members: tuple[int, ...], path: Path) -> None:
        """Write these members as one group file, and forget them. The disk holds up no other episode."""
        finished = self._finished[purpose, visit]
        trajectories = tuple(finished[m] for m in sorted(members))
        await asyncio.to_thread(Group(trajectories[0].task, visit, trajectories).save, path)
        self.forget(purpose, visit, members)

    def forget(self, purpose: str, visit: int, members: tuple[int, ...]) -> None:
        """Forget these members, where they finished."""
        finished = self._finished.get((purpose, visit), {})
        for member in members:
            finished.pop(member, None)
        if not finished:
            self._finished.pop((purpose, visit), None)

    def discard(self, purpose: str, visit: int, known: tuple[int, ...]) -> int:
        """Forget the visit: what has finished and what still plays. Returns its tokens, without members in `known`."""
        finished = self._finished.pop((purpose, visit), {})
        playing = self._playing.pop((purpose, visit), {})
        for task in playing:
            task.cancel()
        if self._lockstep is not None:
            self._lockstep.take_back(purpose, visit)
        unknown = sum(t.loss_tokens for member, t in finished.items() if member not in known)
        return unknown + sum(seat.tokens for seat in playing.values())

    def expect(self, purpose: str, visits: tuple[int, ...], members: int) -> None:
        """`members` episodes of each of these visits will start, and no other of those announced before."""
        if self._lockstep is not None:
            self._lockstep.expect({(purpose, visit, member) for visit in visits for member in range(members)})


class Lockstep:
    """A barrier before the engine, so that what is batched together never depends on timing.

    Every live episode either waits here or plays its environment; only when all of them wait, and all that are
    announced have started, are their turns generated, in the order of their keys. With one engine and one worker this
    makes a synchronous run bit-reproducible. Waves do not overlap: what an older one announced and never started (its
    group was given up before) is not waited for in a newer.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._expected: set[tuple[str, int, int]] = set()  # announced episodes that have not yet started
        self._live = 0
        self._waiting: dict[str, tuple[asyncio.Future[Generation], dict[str, Any]]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def expect(self, episodes: set[tuple[str, int, int]]) -> None:
        """These (purpose, visit, member) will start."""
        self._expected = episodes

    def take_back(self, purpose: str, visit: int) -> None:
        """What was announced of this visit will not start any more."""
        self._expected = {episode for episode in self._expected if episode[:2] != (purpose, visit)}
        asyncio.get_running_loop().call_soon(self._fire_if_complete)  # once what was cancelled of it waits no more

    @contextlib.asynccontextmanager
    async def player(self, episode: tuple[str, int, int]) -> AsyncIterator[_LockedEngine]:
        self._expected.discard(episode)
        self._live += 1
        try:
            yield _LockedEngine(self, await self._link.client())
        finally:
            self._live -= 1
            self._fire_if_complete()

    async def generate(self, request: dict[str, Any]) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request["session"]] = (future, request)
        self._fire_if_complete()
        try:
            return await future
        finally:  # a cancelled episode is not waited for, and nothing is generated for it
            if self._waiting.get(request["session"], (None,))[0] is future:
                del self._waiting[request["session"]]

    def _fire_if_complete(self) -> None:
        if not self._expected and self._waiting and len(self._waiting) >= self._live:
            batch, self._waiting = self._waiting, {}
            task = asyncio.create_task(self._fire([batch[key] for key in sorted(batch)]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _fire(self, batch: list[tuple[asyncio.Future[Generation], dict[str, Any]]]) -> None:
        try:
            engine = await self._link.client()
            results = await engine.generate_many(tuple(request for _, request in batch))
        except Exception as error:  # every waiting episode gets the cause
            for future, _ in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (future, _), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, str):
                future.set_exception(EngineError(result))
            else:
                future.set_result(result)


class _LockedEngine:
    """The engine as one episode of a lockstep run sees it, and the way to it."""

    up = True

    def __init__(self, lockstep: Lockstep, engine: EngineClient) -> None:
        self._lockstep, self._engine = lockstep, engine

    async def client(self) -> _LockedEngine:
        return self

    async def generate(self, session: str, ids: np.ndarray, sampling: Sampling, **options: Any) -> Generation:
        return await self._lockstep.generate({"session": session, "ids": ids, "sampling": sampling, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Process entry. args: model_dir, tool_format, env_addresses, engine_addresses (by rank), stale_address, lockstep,
    start_s."""
    async with contextlib.AsyncExitStack() as stack:
        env = await stack.enter_async_context(LocalClient(tuple(args["env_addresses"])))
        links = {name: EngineLink(address, args["start_s"]) for name, address in args["engine_addresses"].items()}
        stale = EngineLink(args["stale_address"], args["start_s"]) if args["stale_address"] else None
        for link in (*links.values(), *((stale,) if stale else ())):
            stack.push_async_callback(link.close)
        chat = load_chat(Path(args["model_dir"]), args["tool_format"])
        worker = Worker(chat, env, links, lockstep=args["lockstep"], stale=stale)

        async def handle(peer: Peer, method: str, payload: dict[str, Any]) -> Any:
            match method:
                case "episode":
                    return await worker.episode(**payload)
                case "turns":
                    return await worker.turns(payload["wait_s"])
                case "move":
                    return worker.move(payload["moves"])
                case "seal":
                    return await worker.seal(
                        payload["purpose"], payload["visit"], payload["members"], Path(payload["path"])
                    )
                case "forget":
                    return worker.forget(payload["purpose"], payload["visit"], payload["members"])
                case "discard":
                    return worker.discard(payload["purpose"], payload["visit"], payload["known"])
                case "expect":
                    return worker.expect(**payload)
            raise ValueError(f"a rollout worker has no method {method!r}")

        async with serve(socket_path, handle):
            await asyncio.Event().wait()
