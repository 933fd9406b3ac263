"""The one wire format: msgpack frames with numpy arrays and registered records, and a small RPC over Unix sockets.

Owns: how Python values become bytes (`pack`, `unpack`) and how two of our processes talk (`Server`, `Client`).
Invariants: nothing is pickled; a sequence always comes back as a tuple; every call has a deadline; a lost peer
fails every pending call with `ConnectionLost` instead of leaving it to wait.
Called by: every process of a run (environment workers, rollout workers, engines, trainer ranks, driver).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import struct
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
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


@contextlib.asynccontextmanager
async def serve(
    path: str,
    handler: Handler,
    *,
    on_disconnect: Callable[[Peer], None] | None = None,
) -> AsyncIterator[None]:
    """Serve calls on the Unix socket `path` until the block ends. Calls of one peer run concurrently.

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

    server = await asyncio.start_unix_server(connection, path, limit=1 << 20)
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
        """Connect, trying again until `deadline_s` seconds have passed (the server may still be starting)."""
        until = time.monotonic() + deadline_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
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
