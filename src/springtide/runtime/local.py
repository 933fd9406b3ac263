"""The runtime: every program of a run in a process of its own, one torch thread each.

Owns: which processes a run has, what each is started with, and who reaches whom (where they live: `runtime.launch`).
Invariants: bulk data goes from a rollout worker to a file to the trainer, and from the trainer to the store to an
engine, never through the driver; a restarted engine holds the versions its predecessor held before anyone uses it;
nothing outlives the block, nor a driver that was killed in it.
Called by: the driver (`open_run`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.config import Config, ConfigError
from springtide.engine.protocol import EngineStats
from springtide.env.local import LocalClient, LocalRunner
from springtide.models.presets import resolve_model
from springtide.process import CONTROL_S, scratch_directory, task_group
from springtide.runtime.launch import open_places
from springtide.runtime.ranks import Pool, Program, Rank, keep_alive
from springtide.runtime.world import World
from springtide.weights.pins import Pins
from springtide.wire import ConnectionLost

_LOAD_S = 300.0  # deadline for an engine to take a version
_NAMED_AFTER = 0.25  # of the time after which a silent rank is killed, it is named where a person looks


@dataclass(slots=True)
class Runtime:
    """The processes of a run, up."""

    env: LocalRunner
    catalog: LocalClient
    trainer: World
    reference: Rank | World | None
    proximal: Rank | None
    engines: list[Rank]
    workers: list[Rank]
    pool: Pool
    model_dir: Path
    weights: Path
    pins: Pins
    silent_s: float
    stale: Rank | None = None  # the engine of the stale pool, where an engine holds one version only
    versions: dict[str, int] = field(default_factory=dict)  # holder -> version every engine must hold
    guests: dict[str, Rank] = field(default_factory=dict)  # trainer rank -> the engine that it hosts while it is lent
    _former: list[EngineStats] = field(default_factory=list)  # of guests that went: what they did

    @property
    def playing(self) -> list[Rank]:
        """The engines, and the guests that hold the rollout role."""
        return [*self.engines, *(guest for guest in self.guests.values() if guest.role == "rollout")]

    async def lend(self, trainer: str) -> None:
        """Let this trainer rank play: its guest starts, with every version that is in use."""
        await self.guests[trainer].assume("rollout", None, deadline_s=_LOAD_S)

    async def take_back(self, trainer: str) -> None:
        """Its guest ends, and what it held in memory is free."""
        guest = self.guests[trainer]
        with contextlib.suppress(ConnectionLost):  # it died: its counts are lost
            self._former.append(await guest.call("stats", deadline_s=CONTROL_S))
        await guest.rest(deadline_s=_LOAD_S)

    async def load(self, version: int, *, stale: int | None = None) -> None:
        """Every engine pulls and verifies `version` and makes it the newest; `stale` becomes the stale pool's."""
        self.versions["current"] = version
        await self._each("load", version=version)
        if stale is not None:
            before = self.versions.get("stale")
            if self.stale is not None:
                self.pins.add(stale, "stale")
                self.versions["stale"] = stale
                await self._all([self.stale], "load", version=stale)
            else:
                await self.pin(stale, holder="stale")
            if before is not None:
                self.pins.remove(before, "stale")
                if before not in self.versions.values():
                    await self._each("drop", version=before)

    async def pin(self, version: int, *, holder: str = "eval") -> None:
        """Keep `version` in every engine, and in the store for an engine that is restarted, for `holder`."""
        self.pins.add(version, holder)
        self.versions[holder] = version
        await self._each("pin", version=version)

    async def unpin(self, *, holder: str = "eval") -> None:
        """Give up what `holder` kept, unless another holder needs it."""
        version = self.versions.pop(holder)
        self.pins.remove(version, holder)
        pinning = self.versions.keys() - ({"current"} if self.stale is None else {"current", "stale"})
        if version not in {self.versions[h] for h in pinning}:  # the newest is only unpinned
            await self._each("drop", version=version)

    async def engine_stats(self) -> list[EngineStats]:
        stats = list(self._former)
        for engine in self.playing:
            with contextlib.suppress(ConnectionLost):  # it is being restarted; its counts start again
                stats.append(await engine.call("stats", deadline_s=CONTROL_S))
        return stats

    async def pace_counts(self) -> dict[str, float]:
        """What paced ranks that are no engines have counted so far, together (see `springtide.pace`)."""
        total: Counter[str] = Counter()
        for rank in (*self.trainer.ranks, *(r for r in (self.reference, self.proximal) if isinstance(r, Rank))):
            with contextlib.suppress(ConnectionLost):  # it is being restarted; its counts start again
                total.update((await rank.call("status", deadline_s=CONTROL_S))["pace"])
        return dict(total)

    def silent(self) -> str:
        """Who has answered nothing for a while, for people to read; empty if all answer."""
        ranks = (self.trainer, self.reference, self.proximal, *self.playing, *self.workers)
        silences = {r.name: r.silence_s for r in ranks if r is not None}
        return ", ".join(
            f"{name} has answered nothing for {s:.0f} s"
            for name, s in silences.items()
            if s > _NAMED_AFTER * self.silent_s
        )

    def restarts(self) -> dict[str, int]:
        """How often processes were replaced, by name; only those that were."""
        ranks = {r.name: r.restarts for r in (*self.engines, *self.guests.values(), *self.workers) if r.restarts}
        counts = self.env.counts
        env = counts.get("lost", 0) + counts.get("replaced", 0)
        return {**ranks, **({"env": env} if env else {})}

    async def prepare_engine(self, engine: Rank) -> None:
        """Give a (re)started engine every version that is in use, the newest first: turns wait for nothing else."""
        apart = self.stale is not None  # the stale pool's engine holds nothing else, and no other holds that
        held = {h: v for h, v in self.versions.items() if not apart or (h == "stale") == (engine is self.stale)}
        newest, kept = {held.pop("current")} if "current" in held else set(), set(held.values())
        for version in (*newest, *sorted(kept - newest)):
            if version not in self.versions.values():
                continue  # given up while another was loaded: it may be gone from the store
            await engine.call("load", version=version, deadline_s=_LOAD_S)
            if version in kept and engine is not self.stale:
                await engine.call("pin", version=version, deadline_s=_LOAD_S)

    async def _each(self, method: str, **payload: Any) -> None:
        await self._all([e for e in self.playing if e is not self.stale], method, **payload)

    async def _all(self, engines: list[Rank], method: str, **payload: Any) -> None:
        """Call them; one that is given the versions in use just now, having died, is called after that."""
        async with task_group() as tasks:
            for engine in engines:
                tasks.create_task(_call(engine, method, **payload))


async def _call(engine: Rank, method: str, **payload: Any) -> None:
    with contextlib.suppress(ConnectionLost):  # a guest that went meanwhile
        await engine.call_again(method, deadline_s=_LOAD_S, **payload)


@contextlib.asynccontextmanager
async def open_runtime(
    config: Config, run: Path, model_dir: Path, *, checkpoint: Path | None
) -> AsyncIterator[Runtime]:
    """Start every process of the run, together. The trainer holds `checkpoint`, or the model where there is none.

    Raises: ConfigError (before anything starts), ProcessFailed.
    """
    start_s, silent_s = config.runtime.start_s, config.runtime.silent_s
    tree = config.model_dump(mode="json")
    seats = _seats(config)

    def rank(name: str, entry: str | None, args: dict[str, Any], *, restart: bool, **more: Any) -> Rank:
        return Rank(
            name,
            entry,
            args,
            log_dir=run / "logs",
            socket_path=f"{sockets}/{name}",
            start_s=more.pop("start_s", start_s),
            restart=restart,
            silent_s=silent_s,
            launch=places.launch,
            **more,
        )

    def seated(role: str) -> list[str]:
        return [name for name, held in seats.items() if held == role]

    async def prepare(engine: Rank) -> None:
        await runtime.prepare_engine(engine)

    async with contextlib.AsyncExitStack() as stack:
        # Ranks of several nodes need what they all see; where that cannot be written is said before any process starts.
        configured = Path(config.weights.dir) if config.weights.dir else None
        if configured is not None:
            weights = stack.enter_context(weights_directory(run, configured))
        places = await stack.enter_async_context(open_places(config, run, seats))
        sockets = places.directory
        if configured is None:
            weights = stack.enter_context(weights_directory(run, places.weights))
        env = LocalRunner(
            tuple(s.use for s in config.suites),
            config.runtime.env_workers,
            run / "logs",
            start_s=start_s,
            silent_s=silent_s,
            launch=places.launch,
            directory=sockets,
        )
        await stack.enter_async_context(env)
        vllm = config.engine.kind == "vllm"
        engine_s = config.engine.vllm.start_s if vllm else start_s
        plays = f"springtide.engine.{'vllm' if vllm else 'server'}:main"
        about = {"model": str(model_dir), "store": str(weights), "config": tree}
        engine: dict[str, Any] = {"restart": True, "prepare": prepare, "start_s": engine_s}
        engines = [rank(name, plays, {**about, "index": i}, **engine) for i, name in enumerate(seated("rollout"))]
        guests = {
            name: rank(
                f"{name}-guest",
                None,
                {},
                roles={"rollout": Program(plays, {**about, "index": len(engines) + i}, take="load")},
                **engine,
            )
            for i, name in enumerate(seated("trainer") if config.trainer.lend else ())
        }
        stale = engines[-1] if config.stale_apart else None
        workers = [
            rank(
                name,
                "springtide.rollout.worker:main",
                {
                    "model_dir": str(model_dir),
                    "tool_format": config.model.tool_format,
                    "env_addresses": list(env.addresses),
                    "engine_addresses": {
                        **{e.name: e.socket_path for e in engines if e is not stale},
                        **{trainer: guest.socket_path for trainer, guest in guests.items()},
                    },
                    "stale_address": stale.socket_path if stale else None,
                    "lockstep": config.schedule.policy == "synchronous",
                    "start_s": engine_s,
                },
                restart=True,
            )
            for name in seated("worker")
        ]
        # A frozen rank is empty until the driver lets it assume its role: which weights the run's start are is known
        # after a cold start, and the proximal policy pulls each step's.
        frozen = {
            "reference": resolve_model(config.reference.path) if config.reference.path else run / "start",
            "proximal": model_dir,
        }
        init: dict[str, Any] = {"config": tree, "model": str(model_dir), "store": str(weights)}
        init["reference"] = str(frozen["reference"])
        init["checkpoint"] = str(checkpoint) if checkpoint else None
        size, fsdp = config.trainer.ranks, config.trainer.sharding == "fsdp"
        world = {"size": size, "meet": f"file://{sockets}/meet", "loopback": places.weights is None}
        trainer = World(
            [
                rank(
                    name,
                    "springtide.trainer.rank:main",
                    {**init, "world": {"rank": i, **world} if size > 1 or fsdp else None},
                    restart=False,
                )
                for i, name in enumerate(seated("trainer"))
            ]
        )
        idle = {
            name: rank(
                name,
                None,
                {},
                restart=True,
                roles={
                    "reference": Program(
                        "springtide.trainer.rank:main",
                        {"config": tree, "model": str(frozen[name]), "store": str(weights), "role": "reference"},
                        take="pull",
                    )
                },
            )
            for name in seated("reference")
        }
        catalog = await stack.enter_async_context(LocalClient(env.addresses))
        runtime = Runtime(
            env,
            catalog,
            trainer,
            trainer if config.algorithm.kl_coef > 0 and "reference" not in idle else idle.get("reference"),
            idle.get("proximal"),
            engines,
            workers,
            Pool(workers, start_s),
            model_dir,
            weights,
            Pins(weights),
            silent_s,
            stale,
            guests=guests,
        )
        ranks = [*trainer.ranks, *engines, *guests.values(), *workers, *idle.values()]
        await stack.enter_async_context(keep_alive(ranks))
        yield runtime


def _seats(config: Config) -> dict[str, str]:
    """Every process of a run by name: its rank's role, or `worker`, or `env`."""
    size = config.trainer.ranks
    seats = {f"trainer-{i}" if size > 1 else "trainer": "trainer" for i in range(size)}
    if config.reference_apart:
        seats["reference"] = "reference"
    if config.algorithm.old_logprobs == "recompute":
        seats["proximal"] = "reference"
    seats |= {f"engine-{i}": "rollout" for i in range(config.engines)}
    seats |= {f"rollout-{i}": "worker" for i in range(config.runtime.rollout_workers)}
    return seats | {f"env-w{i}": "env" for i in range(config.runtime.env_workers)}


@contextlib.contextmanager
def weights_directory(run: Path, configured: Path | None) -> Iterator[Path]:
    """Where this incarnation's published weights live; what one before it left is removed, for we hold the run's lock.

    In `configured` if given, else in shared memory if there is any, else in the run directory. Raises: ConfigError.
    """
    shared, run = Path("/dev/shm"), run.resolve()  # however it is spelled
    parent = configured or (shared if os.access(shared, os.W_OK) else run)
    tag = hashlib.sha256(str(run).encode()).hexdigest()[:12]  # two runs of one name must not meet
    prefix = f"springtide-{run.name}-{tag}-"
    with contextlib.ExitStack() as held:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for left in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
                shutil.rmtree(left, ignore_errors=True)
            weights = held.enter_context(scratch_directory(prefix, parent))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"weights.dir: cannot write {parent}: {why}; name a directory that can be written"
            ) from None
        yield weights
