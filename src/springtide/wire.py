"""The one wire format: msgpack frames with numpy arrays and registered records, and a small RPC over sockets.

Owns: how Python values become bytes (`pack`, `unpack`) and how two of our processes talk (`serve`, `Client`).
Invariants: nothing is pickled; a sequence always comes back as a tuple; every call has a deadline; a lost peer
fails every pending call with `ConnectionLost` instead of leaving it to wait; over TCP neither side sends or reads a
call before both have proved that they know the server's key.
Called by: every process of a run (environment workers, rollout workers, engines, trainer ranks, driver).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import logging
import os
import re
import secrets
import socket
import stat
import struct
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np

log = logging.getLogger(__name__)

_RECORD, _ARRAY, _INT = 1, 2, 3
_MAX_FRAME = 1 << 30  # bytes: a larger frame is a bug (bulk data travels as files), not a message
_records: dict[str, type] = {}
C = TypeVar("C", bound=type)


class WireError(Exception):
    """Bytes that are not a value of this format, or a value that has no place in it."""


class RemoteError(Exception):
    """The peer's handler raised. `kind` is the exception's class name, `remote_traceback` its text."""

    def __init__(self, kind: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.remote_traceback = kind, message, remote_traceback


class ConnectionLost(Exception):
    """The peer went away while a call was pending, or before it was made."""


class DeadlineExceeded(Exception):
    """A call's deadline passed. The text says what was waited for and for how long."""


def record(cls: C) -> C:
    """Register a dataclass under its class name, so that `pack` and `unpack` carry it."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass; put @record above @dataclass")
    if cls.__name__ in _records and _records[cls.__name__].__module__ != cls.__module__:
        raise TypeError(f"two records are called {cls.__name__}")
    _records[cls.__name__] = cls
    return cls


def pack(value: Any) -> bytes:
    """Encode `value`: None, bool, int, float, str, bytes, tuple/list, dict, numpy array or scalar, record.

    Raises: WireError for anything else, an object array included.
    """
    try:
        return msgpack.packb(value, default=_encode, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot encode: {error}") from error


def unpack(data: bytes) -> Any:
    """Decode what `pack` wrote; arrays are fresh and writable. Raises: WireError."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode, raw=False, use_list=False, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:  # msgpack raises several unrelated classes for corrupt input
        raise WireError(f"cannot decode {len(data)} bytes: {error}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an object array")
        return msgpack.ExtType(_ARRAY, pack((value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):  # beyond 64 bits
        return msgpack.ExtType(_INT, str(value).encode())
    name = type(value).__name__
    if _records.get(name) is type(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        return msgpack.ExtType(_RECORD, pack((name, fields)))
    raise TypeError(f"a {type(value).__module__}.{name}")


def _decode(code: int, data: bytes) -> Any:
    if code == _INT:
        return int(data)
    if code == _ARRAY:
        dtype, shape, raw = unpack(data)
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
    if code == _RECORD:
        name, fields = unpack(data)
        if name not in _records:
            raise WireError(f"unknown record {name!r}")
        known = {f.name for f in dataclasses.fields(_records[name])}
        return _records[name](**{k: v for k, v in fields.items() if k in known})
    raise WireError(f"unknown extension {code}")


# --- RPC -----------------------------------------------------------------------------------------------------------

Handler = Callable[["Peer", str, dict[str, Any]], Awaitable[Any]]
_CALL, _REPLY, _ERROR = 0, 1, 2


async def _read(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    (size,) = struct.unpack("<I", await reader.readexactly(4))
    if size > _MAX_FRAME:
        raise WireError(f"a frame of {size} bytes; at most {_MAX_FRAME}")
    return unpack(await reader.readexactly(size))


class Peer:
    """One connection, seen from the server: what a handler may keep state by."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def _send(self, frame: tuple[Any, ...]) -> None:
        # Never waits; a lost connection is ignored, its reader notices.
        if not self._writer.is_closing():
            data = pack(frame)
            self._writer.write(struct.pack("<I", len(data)) + data)


# --- where a server is found ------------------------------------------------------------------------------------------
#
# An address is the path of a Unix socket, or "tcp://HOST:LOW-HIGH/FILE": a free port of that range (0-0: any) on HOST.
# A client needs only a path: the socket's, or FILE, into which a TCP server writes where it listens, and a random key
# that whoever may read FILE has. So a server that comes up elsewhere is found by the path of its predecessor.

_TCP = re.compile(r"tcp://(.+):(\d+)-(\d+)(/.*)")
_GREETING_S, _DIAL_S = 10.0, 5.0
_KEEPALIVE_S = 20  # a peer whose machine has vanished is lost after so long


def path_of(address: str) -> str:
    """What clients of a server at `address` open."""
    found = _TCP.fullmatch(address)
    return found[4] if found else address


async def _listen(address: str, connection: Any) -> asyncio.Server:
    found = _TCP.fullmatch(address)
    if found is None:
        return await asyncio.start_unix_server(connection, address, limit=1 << 20)
    host, low, high, file, key = found[1], int(found[2]), int(found[3]), found[4], secrets.token_bytes(32)

    async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_S):
                await _greet(reader, writer, key, b"server", b"client")
        except OSError as error:  # a stranger, or one that left (time-outs are OSErrors too)
            log.warning("refused a connection from %s: %s", writer.get_extra_info("peername"), error)
            writer.close()
            return
        await connection(reader, writer)

    for port in range(low, high + 1):
        try:
            server = await asyncio.start_server(greeted, host, port, limit=1 << 20)
            break
        except OSError as error:
            if port == high:
                ports = f"port of {low}-{high}" if low != high else f"port {low}" if low else "port"
                raise OSError(f"cannot listen on {host}, no {ports} is free: {error.strerror or error}") from error
    place = {"host": host, "port": server.sockets[0].getsockname()[1], "key": key.hex()}
    scratch = f"{file}.{os.getpid()}"
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(place, out)
    os.replace(scratch, file)
    return server


async def _dial(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises: OSError."""
    if stat.S_ISSOCK(os.stat(path).st_mode):
        return await asyncio.open_unix_connection(path, limit=1 << 20)
    place = json.loads(Path(path).read_text())
    async with asyncio.timeout(_DIAL_S):
        reader, writer = await asyncio.open_connection(place["host"], place["port"], limit=1 << 20)
        try:
            await _greet(reader, writer, bytes.fromhex(place["key"]), b"client", b"server")
        except BaseException:
            writer.close()
            raise
    return reader, writer


async def _greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, mine: bytes, theirs: bytes
) -> None:
    """Prove to the peer that we know `key`, and see that it does: neither sends it. Raises: OSError."""
    connected: socket.socket = writer.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 5), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", 1000 * _KEEPALIVE_S)):
        if (number := getattr(socket, f"TCP_{option}", None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, number, value)
    nonce = secrets.token_bytes(32)
    try:
        writer.write(nonce)
        other = await reader.readexactly(32)
        writer.write(hmac.digest(key, mine + nonce + other, "sha256"))
        proof = await reader.readexactly(32)
    except asyncio.IncompleteReadError:
        raise ConnectionError("it left before it proved that it knows the key") from None
    if not hmac.compare_digest(proof, hmac.digest(key, theirs + other + nonce, "sha256")):
        raise ConnectionError("it does not know the key")


@contextlib.asynccontextmanager
async def serve(
    path: str,
    handler: Handler,
    *,
    on_disconnect: Callable[[Peer], None] | None = None,
) -> AsyncIterator[None]:
    """Serve calls at the address `path` until the block ends. Calls of one peer run concurrently.

    `handler(peer, method, payload)` returns the reply or raises; what it raises reaches the caller as RemoteError.
    When a peer goes away its running handlers are cancelled and `on_disconnect` is called.
    """

    async def answer(peer: Peer, number: int, method: str, payload: dict[str, Any]) -> None:
        try:
            peer._send((_REPLY, number, "", await handler(peer, method, payload)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a handler's failure belongs to its caller, not to the server
            peer._send((_ERROR, number, type(error).__name__, (str(error), traceback.format_exc())))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                _, number, method, payload = await _read(reader)
                task = asyncio.create_task(answer(peer, number, method, payload))
                running.add(task)
                task.add_done_callback(running.discard)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the peer left, or this process ends: in both cases nobody waits for more
        finally:
            for task in running:
                task.cancel()
            writer.close()
            if on_disconnect:
                on_disconnect(peer)

    server = await _listen(path, connection)
    try:
        yield
    finally:
        server.close()


class Client:
    """A connection to a `serve`d socket. Use `async with Client.connect(path, ...)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self._reader, self._writer, self.name = reader, writer, name
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self.lost = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    @classmethod
    async def open(cls, path: str, *, name: str, deadline_s: float) -> Client:
        """Connect, trying again until `deadline_s` seconds have passed (the server may still be starting).

        path: `path_of` the server's address; read anew at each attempt, as the server may have moved.
        """
        until = time.monotonic() + deadline_s
        while True:
            try:
                reader, writer = await _dial(path)
                return cls(reader, writer, name)
            except OSError as error:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{name} did not listen on {path} within {deadline_s:g} s ({error})"
                    ) from error
                await asyncio.sleep(0.02)

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, path: str, *, name: str, deadline_s: float) -> AsyncIterator[Client]:
        client = await cls.open(path, name=name, deadline_s=deadline_s)
        try:
            yield client
        finally:
            await client.close()

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """Call and wait for the reply. Raises: RemoteError, ConnectionLost, DeadlineExceeded."""
        if self.lost.is_set():
            raise ConnectionLost(f"{self.name} is gone ({method})")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        data = pack((_CALL, number, method, payload))
        self._pending[number] = future
        try:
            self._writer.write(struct.pack("<I", len(data)) + data)
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not answer {method} within {deadline_s:g} s") from None
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()

    async def _listen(self) -> None:
        why = "went away"
        try:
            while True:
                kind, number, name, body = await _read(self._reader)
                future = self._pending.get(number)
                if future is None or future.done():
                    continue  # its caller's deadline passed
                if kind == _REPLY:
                    future.set_result(body)
                else:
                    future.set_exception(RemoteError(name, *body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except WireError as error:  # where the next frame begins is not known any more
            why = f"sent what cannot be read: {error}"
        finally:
            self.lost.set()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ConnectionLost(f"{self.name} {why}"))
