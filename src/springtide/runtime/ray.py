"""The Ray runtime: every process of a run under an actor of its own, on the nodes of a Ray cluster.

Owns: the connection to Ray (one that it starts and ends itself, or a cluster's), the run's placement group, and an
actor a seat. Invariants: an actor supervises the same child processes as the local runtime starts, so a killed program
is replaced in its actor, and a killed actor or node by a new actor in the same bundle; what processes say to each other
goes over the wire's own sockets, bulk data as files by name: Ray carries names, texts and figures; a Ray of our own
listens on loopback only and leaves nothing behind.
Called by: `runtime.launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import springtide
from springtide.config import Config, ConfigError
from springtide.process import ProcessFailed, connect, log_tail, scratch_directory, start_sweeper
from springtide.runtime.launch import Places
from springtide.runtime.ray_host import Host, describe
from springtide.wire import Client

log = logging.getLogger(__name__)

_DIAL_S, _STOP_S = 5.0, 15.0
_LOOK_S, _LOOKS = 2.0, 10  # at a program's silence, and at an actor that does not answer, before it is killed
# Waits for the driver's end. Of a Ray whose driver was killed, two agents would live on for minutes; they have written
# their title over their environment, but hold their logs open.
_SWEEP = """read -r _
held() {
    grep -alsF -- "RAY_AUTH_TOKEN_PATH=$1/" /proc/[0-9]*/environ
    find /proc/[0-9]*/fd -lname "$1/*" 2>/dev/null
}
while pids=$(held "$1" | cut -d/ -f3 | sort -u | grep -vx "$2") && [ "$pids" ]; do kill -9 $pids; sleep 0.1; done"""
_TOKEN = secrets.token_hex(32)  # of every Ray that this process starts


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError('runtime.kind: "ray" needs Ray, which is not there; pip install "springtide[ray]"') from None
    return ray


@contextlib.asynccontextmanager
async def open_ray(config: Config, run: Path, seats: Mapping[str, str]) -> AsyncIterator[Places]:
    """See `open_places`. Raises: ConfigError, ProcessFailed."""
    options, start_s = config.runtime.ray, config.runtime.start_s
    bundles = [_bundle(config, role) for role in seats.values()]
    labels = [options.labels.get(role, {}) for role in seats.values()]  # type: ignore[call-overload]
    run = run.absolute()
    async with contextlib.AsyncExitStack() as stack:
        ray = stack.enter_context(_connected(config, bundles))
        group = ray.util.placement_group(bundles, strategy=options.strategy, bundle_label_selector=labels)
        stack.callback(ray.util.remove_placement_group, group)
        if not await asyncio.to_thread(group.wait, start_s):
            raise ProcessFailed(_unplaced(ray, seats, bundles, labels, start_s), final=True)
        nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
        weights, parent = None, None
        if len(nodes) > 1:  # also processes that are replaced must find them, so every node must see them
            weights, parent = Path(config.weights.dir).absolute() if config.weights.dir else run, run
            await _look_at_nodes(ray, nodes, {"run.dir": run, "weights.dir": weights}, start_s)
        directory = stack.enter_context(scratch_directory(".places-" if parent else "springtide-", parent))
        launcher = _Launcher(
            ray, group, list(seats), bundles, several=len(set(nodes.values())) > 1, ports=options.ports
        )
        stack.callback(launcher.close)
        yield Places(launcher.start, directory, weights)


def _bundle(config: Config, role: str) -> dict[str, float]:
    """What Ray sets aside for a process of this role."""
    devices = {"rollout": config.engine.device, "trainer": config.trainer.device, "reference": config.trainer.device}
    usual = {"CPU": 1.0, "GPU": 1.0 if devices.get(role, "cpu").startswith("cuda") else 0.0}
    wanted = {**usual, **config.runtime.ray.resources.get(role, {})}  # type: ignore[call-overload]
    return {name: amount for name, amount in wanted.items() if amount > 0}


# --- Ray, ours or a cluster's -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(config: Config, bundles: list[dict[str, float]]) -> Iterator[Any]:
    """Ray, connected. It must be this thread that starts it: what it starts dies with the thread that did."""
    options = config.runtime.ray
    usual: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    loop = {"RAY_USE_UVLOOP": "0"}  # children are watched by asyncio's own loop
    ours = {**loop, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the last: loopback only
    with contextlib.ExitStack() as stack:
        if options.address is None:
            scratch = stack.enter_context(scratch_directory())
            token = scratch / "token"
            token.touch(0o600)
            token.write_text(_TOKEN)
            stack.enter_context(_swept(scratch))
            ours |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": ""}
            stack.enter_context(_environment(ours))
            ray = _ray()
            demand = sum(bundle.get("CPU", 0) for bundle in bundles)
            # Its processors are counted, not measured: here as many processes share them as under the local runtime.
            usual |= {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, int(demand) + 1),
                "object_store_memory": options.object_store_mb << 20,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(scratch),
            }
        else:
            ray = _ray()
            _need_listener(options.address)
            usual |= {"address": options.address, "runtime_env": {"env_vars": loop}}
        handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            ray.init(**usual)
        except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
            why = " ".join(str(error).split())
            if options.address is None:
                raise ProcessFailed(f"Ray did not start: {why}") from error
            raise ConfigError(f"runtime.ray.address: no connection to {options.address}: {why}") from error
        finally:
            for number, handler in handlers.items():
                with contextlib.suppress(ValueError):  # not the main thread's to set
                    signal.signal(number, handler)
        stack.callback(ray.shutdown)
        yield ray


@contextlib.contextmanager
def _swept(scratch: Path) -> Iterator[None]:
    """What belongs to the Ray in `scratch` ends with the block, or with this process, whatever ends it."""
    sweeper = start_sweeper(_SWEEP, str(scratch), str(os.getpid()))
    try:
        yield
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _need_listener(address: str) -> None:
    """Ray itself tries for minutes. Raises: ConfigError."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f"runtime.ray.address: {address!r} is not HOST:PORT of a cluster's head, nor auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_DIAL_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"runtime.ray.address: nothing answers at {address} ({error}); is the head up (`ray status`)?"
        ) from None


def _unplaced(
    ray: Any, seats: Mapping[str, str], bundles: list[dict[str, float]], labels: list[dict[str, str]], waited_s: float
) -> str:
    """What is missing, in a line."""
    asked: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0) + amount
    free = ray.available_resources()
    short = [f"{amount:g} {name} (free: {free.get(name, 0):g})" for name, amount in asked.items()]
    needs = {role: bundle for role, bundle in zip(seats.values(), bundles, strict=True)}
    each = "; ".join(f"{role} {_amounts(bundle)}" for role, bundle in needs.items())
    labelled = f", with labels { ({r: ls for r, ls in zip(seats.values(), labels) if ls}) }" if any(labels) else ""
    return (
        f"the Ray cluster did not give the run its places within {waited_s:g} s: it needs {', '.join(short)} for "
        f"{len(bundles)} processes, each on one node ({each}){labelled}; add nodes, or set runtime.ray.resources"
    )


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


async def _look_at_nodes(ray: Any, nodes: dict[str, str], paths: dict[str, Path], start_s: float) -> None:
    """Every node must hold our Springtide and see the driver's files. Raises: ConfigError."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probes = {key: path / f".probe-{secrets.token_hex(8)}" for key, path in paths.items()}
    for path in probes.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    task = ray.remote(num_cpus=0, max_retries=0)(describe)
    try:
        for node, ip in nodes.items():
            here = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            try:
                async with asyncio.timeout(start_s):
                    told = await here.remote([str(p) for p in probes.values()], os.getcwd())
            except TimeoutError:
                raise ConfigError(f"runtime.ray: node {ip} answered nothing within {start_s:g} s") from None
            except ray.exceptions.RayError as error:
                why = " ".join(str(error).split())[-300:]
                raise ConfigError(
                    f"runtime.ray: node {ip} cannot run springtide: {why}; every node needs the driver's environment"
                ) from error
            if told["springtide"] != springtide.__version__:
                versions = f"springtide {told['springtide']}, the driver {springtide.__version__}"
                raise ConfigError(f"runtime.ray: node {ip} has {versions}; install one version on all")
            for key, path in probes.items():
                if str(path) in told["missing"]:
                    raise ConfigError(
                        f"{key}: node {ip} does not see {path.parent}; on several nodes run.dir and weights.dir must "
                        "be on a file system that all of them share"
                    )
            if not told["directory"]:
                raise ConfigError(f"run: node {ip} has no {os.getcwd()}; start the run in a directory that all share")
    finally:
        for path in probes.values():
            path.unlink(missing_ok=True)


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Seat:
    """An actor in its bundle."""

    actor: Any
    ip: str
    dead: bool = False


class _Launcher:
    """`start` is this runtime's `Launcher`. An actor outlives the programs it is asked to run, one after another."""

    def __init__(
        self, ray: Any, group: Any, names: list[str], bundles: list[dict[str, float]], *, several: bool, ports: Any
    ) -> None:
        self._ray, self._group, self._names, self._bundles = ray, group, names, bundles
        self._several, self._ports = several, ports
        self._seats: dict[str, _Seat] = {}
        self._opening = {name: asyncio.Lock() for name in names}

    def close(self) -> None:
        for seat in self._seats.values():
            self._ray.kill(seat.actor)

    @contextlib.asynccontextmanager
    async def start(
        self,
        name: str,
        entry: str,
        args: dict[str, Any],
        *,
        log_path: Path,
        socket_path: str | None = None,
        deadline_s: float = 120.0,
        silent_s: float | None = None,
        python: str | None = None,
    ) -> AsyncIterator[_Program]:
        """See `start_process`; socket_path is the path by which clients find it, and is needed."""
        assert socket_path is not None
        until = time.monotonic() + deadline_s
        seat = await self._seat(name, deadline_s)
        program = _Program(name, self._ray, seat, log_path.absolute())
        host = seat.ip if self._several else "127.0.0.1"
        left = max(until - time.monotonic(), 0.1)
        options = {
            "log_path": str(program.log_path),
            "socket_path": f"tcp://{host}:{self._ports[0]}-{self._ports[1]}{socket_path}",
            "deadline_s": left,
            "silent_s": silent_s,
            "python": python,
        }
        watcher: asyncio.Task[None] | None = None
        client: Client | None = None
        try:
            starting = seat.actor.start.remote(program.key, name, entry, json.dumps(args), **options)
            answer = await program.ask(starting, left + _STOP_S)
            if "pid" not in answer:
                raise ProcessFailed(**answer)
            program.pid = answer["pid"]
            watcher = asyncio.create_task(program.watch(silent_s))
            program.client = client = await connect(program, socket_path, left)
            yield program
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait({watcher})
            if not seat.dead:
                with contextlib.suppress(ProcessFailed):
                    await program.ask(seat.actor.stop.remote(program.key), _STOP_S)
            if client is not None:
                await client.close()

    async def _seat(self, name: str, deadline_s: float) -> _Seat:
        """The actor of that name; a new one if there is none that lives. Raises: ProcessFailed."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        async with self._opening[name]:
            seat = self._seats.get(name)
            if seat is not None and not seat.dead:
                return seat
            number = self._names.index(name)
            bundle = dict(self._bundles[number])
            actor = (
                self._ray.remote(Host)
                .options(
                    num_cpus=bundle.pop("CPU", 0),
                    num_gpus=bundle.pop("GPU", 0),
                    resources=bundle,
                    max_concurrency=64,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                )
                .remote(os.getcwd())
            )
            try:
                async with asyncio.timeout(deadline_s):
                    where = await actor.where.remote()
            except TimeoutError:
                self._ray.kill(actor)
                needs = _amounts(self._bundles[number])
                raise ProcessFailed(
                    f"{name}: no node of the Ray cluster had room for it ({needs}) within {deadline_s:g} s; it has "
                    f"{_amounts(self._ray.available_resources())} free",
                    final=True,
                ) from None
            except self._ray.exceptions.RayError as error:
                raise _died(name, error) from error
            seat = self._seats[name] = _Seat(actor, where["ip"])
            return seat


def _died(name: str, error: Exception) -> ProcessFailed:
    return ProcessFailed(f"{name}: its Ray actor died: {' '.join(str(error).split())[:300]}", killed=True)


@dataclass(slots=True, eq=False)
class _Program:
    """A running program, as `Supervised`."""

    name: str
    _ray: Any
    seat: _Seat
    log_path: Path
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    pid: int = 0
    client: Client = field(init=False)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: ProcessFailed | None = None
    _silence: float = 0.0
    _heard: float = field(default_factory=time.monotonic)

    async def ask(self, answer: Any, deadline_s: float) -> Any:
        """What the actor answers. Raises: ProcessFailed if it died, or does not answer and so is killed."""
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            text = f"{self.name}: its Ray actor answered nothing for {deadline_s:g} s and was killed"
            raise self._give_up(text) from None
        except self._ray.exceptions.RayError as error:
            self.seat.dead = True
            raise _died(self.name, error) from error

    def _give_up(self, text: str) -> ProcessFailed:
        self.seat.dead = True
        self._ray.kill(self.seat.actor)
        return ProcessFailed(text, killed=True)

    async def watch(self, silent_s: float | None) -> None:
        """Until it has ended, or its actor, which is killed if it answers nothing for `silent_s`."""
        ended = asyncio.ensure_future(self._ended())
        look_s, silent = min(_LOOK_S, (silent_s or _LOOK_S * _LOOKS) / _LOOKS), 0.0
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=look_s)
                if ended.done() or silent_s is None:
                    continue
                try:
                    async with asyncio.timeout(look_s):
                        self._silence = await self.seat.actor.silence.remote(self.key)
                    self._heard, silent = time.monotonic(), 0.0
                except TimeoutError:
                    silent += 2 * look_s
                except self._ray.exceptions.RayError:
                    continue  # `ended` says how
                if silent >= silent_s:
                    self._failure = self._give_up(
                        f"{self.name}: its Ray actor answered nothing for {silent_s:g} s and was killed"
                    )
                    return
            self._failure = ended.result()
        finally:
            ended.cancel()
            if self._failure is not None:
                self.exited.set()

    async def _ended(self) -> ProcessFailed:
        try:
            return ProcessFailed(**await self.seat.actor.ended.remote(self.key))
        except self._ray.exceptions.RayError as error:
            self.seat.dead = True
            return _died(self.name, error)

    @property
    def silence_s(self) -> float:
        """How long ago it answered last, as far as is known here."""
        return self._silence + time.monotonic() - self._heard

    def kill(self) -> None:
        if not self.seat.dead:
            self.seat.actor.kill.remote(self.key)

    def failure(self, when: str = "") -> ProcessFailed:
        """The error to raise when it ended by itself."""
        if self._failure is None:
            return ProcessFailed(f"{self.name} ended{when}; {log_tail(self.log_path)}")
        return self._failure
