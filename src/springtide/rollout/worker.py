"""The rollout worker process: it plays episodes, and keeps their trajectories until the driver seals their group.

Owns: the trajectories of finished members, in memory, until `seal` writes the group's file or `discard` forgets them.
Invariants: it never imports torch; tokens go from here to a file, never to the driver; an episode is answered exactly
once, with a summary.
Called by: the driver, over the wire (`springtide.rollout.worker:main`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from springtide.chat import Chat, load_chat
from springtide.engine.client import EngineClient
from springtide.engine.protocol import Engine, EngineError, Generation, Sampling
from springtide.env.local import LocalClient
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary, play, summarise
from springtide.trace import Group, Trajectory
from springtide.wire import Client, Peer, serve


class Worker:
    """Plays episodes over one environment client and one or more engines."""

    def __init__(
        self,
        chat: Chat,
        env: LocalClient,
        engines: list[EngineLink],
        *,
        lockstep: bool,
        stale: EngineLink | None = None,
    ) -> None:
        """stale: the stale pool's engine, where those of `engines` hold one version only."""
        self._chat, self._env, self._engines, self._stale = chat, env, engines, stale
        self._lockstep = Lockstep(engines[0]) if lockstep else None
        self._finished: dict[tuple[str, int], dict[int, Trajectory]] = {}
        self._playing: dict[tuple[str, int], dict[asyncio.Task[Any], _Counted]] = {}

    async def episode(self, spec: EpisodeSpec) -> EpisodeSummary:
        link = self._engines[spec.visit % len(self._engines)]  # a group shares its prefix, so it shares the engine
        task = asyncio.current_task()
        assert task is not None
        playing = self._playing.setdefault((spec.purpose, spec.visit), {})
        playing[task] = counted = _Counted()
        try:
            if self._lockstep is None:
                engine = counted.over(self._pooled(await link.client(), spec))
                trajectory = await play(spec, self._env, engine, self._chat)
            else:
                async with self._lockstep.player((spec.purpose, spec.visit, spec.member)) as locked:
                    engine = counted.over(self._pooled(locked, spec))
                    trajectory = await play(spec, self._env, engine, self._chat)
        finally:
            playing.pop(task, None)
            if not playing and self._playing.get((spec.purpose, spec.visit)) is playing:
                del self._playing[spec.purpose, spec.visit]
        if not trajectory.outcome.failed_environment:
            self._finished.setdefault((spec.purpose, spec.visit), {})[spec.member] = trajectory
        return summarise(trajectory, generated=counted.tokens)

    def _pooled(self, engine: Any, spec: EpisodeSpec) -> Any:
        if self._stale is None or spec.stale_version is None:
            return engine
        return _WithStalePool(engine, self._stale, spec.stale_version)

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
        return unknown + sum(c.tokens for c in playing.values())

    def expect(self, purpose: str, visits: tuple[int, ...], members: int) -> None:
        """`members` episodes of each of these visits will start, and no other of those announced before."""
        if self._lockstep is not None:
            self._lockstep.expect({(purpose, visit, member) for visit in visits for member in range(members)})


class EngineLink:
    """The way to one engine; a restarted engine is found again at its address."""

    def __init__(self, address: str, start_s: float) -> None:
        self._address, self._start_s = address, start_s
        self._wire: Client | None = None
        self._opening = asyncio.Lock()

    async def client(self) -> EngineClient:
        """The engine now at the address. Raises: DeadlineExceeded if none comes up."""
        async with self._opening:
            if self._wire is None or self._wire.lost.is_set():
                await self.close()
                self._wire = await Client.open(self._address, name="engine", deadline_s=self._start_s)
        return EngineClient(self._wire)

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()


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
    async def player(self, episode: tuple[str, int, int]) -> AsyncIterator[Engine]:
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


class _Counted:
    """Counts the tokens an engine returned to one episode, also of turns that reach no trajectory."""

    def __init__(self) -> None:
        self.tokens = 0

    def over(self, engine: Any) -> Engine:
        self._engine = engine
        return cast(Engine, self)

    async def generate(self, *args: Any, **options: Any) -> Generation:
        generation: Generation = await self._engine.generate(*args, **options)
        self.tokens += len(generation.ids)
        return generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _WithStalePool:
    """An engine that holds one version, and the stale pool's for the turns of that one."""

    def __init__(self, engine: Any, stale: EngineLink, version: int) -> None:
        self._engine, self._stale, self._version = engine, stale, version

    async def generate(self, *args: Any, version: int | None = None, **options: Any) -> Generation:
        if version == self._version:
            with contextlib.suppress(EngineError):  # refreshed meanwhile: then the newest draws this turn
                return await (await self._stale.client()).generate(*args, version=version, **options)
            version = None
        generation: Generation = await self._engine.generate(*args, version=version, **options)
        return generation

    async def release(self, session: str) -> None:
        await (await self._stale.client()).release(session)
        await self._engine.release(session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _LockedEngine:
    """The engine as one episode of a lockstep run sees it."""

    def __init__(self, lockstep: Lockstep, engine: EngineClient) -> None:
        self._lockstep, self._engine = lockstep, engine

    async def generate(self, session: str, ids: np.ndarray, sampling: Sampling, **options: Any) -> Generation:
        return await self._lockstep.generate({"session": session, "ids": ids, "sampling": sampling, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Process entry. args: model_dir, tool_format, env_, engine_ and stale_address(es), lockstep, start_s."""
    async with contextlib.AsyncExitStack() as stack:
        env = await stack.enter_async_context(LocalClient(tuple(args["env_addresses"])))
        links = [EngineLink(address, args["start_s"]) for address in args["engine_addresses"]]
        stale = EngineLink(args["stale_address"], args["start_s"]) if args["stale_address"] else None
        for link in (*links, *((stale,) if stale else ())):
            stack.push_async_callback(link.close)
        chat = load_chat(Path(args["model_dir"]), args["tool_format"])
        worker = Worker(chat, env, links, lockstep=args["lockstep"], stale=stale)

        async def handle(peer: Peer, method: str, payload: dict[str, Any]) -> Any:
            match method:
                case "episode":
                    return await worker.episode(payload["spec"])
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
