"""The wire: values survive it, faults and lost peers reach the caller in words."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.trace import Outcome, Segment
from springtide.wire import (
    Client,
    ConnectionLost,
    DeadlineExceeded,
    RemoteError,
    WireError,
    pack,
    record,
    serve,
    unpack,
)

scalars = (
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4).map(tuple) | st.dictionaries(st.text(), v, max_size=4), max_leaves=12
)


@given(values)
def test_plain_values_come_back_equal(value: Any) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool"])
def test_arrays_come_back_equal_and_writable(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]  # not contiguous
    back = unpack(pack(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    back[0, 0] = 1


def test_records_come_back_as_themselves() -> None:
    segment = Segment(
        np.arange(3, dtype=np.int32), np.array([False, True, True]), np.zeros(3, np.float32), np.array([-1, 7, 7])
    )
    back, outcome = unpack(pack((segment, Outcome("completed", 1.0, True))))
    assert isinstance(back, Segment)
    assert np.array_equal(back.versions, segment.versions)
    assert outcome == Outcome("completed", 1.0, True)


def test_what_has_no_place_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="set"):
        pack({1, 2})
    with pytest.raises(WireError, match="object array"):
        pack(np.array([object()]))
    with pytest.raises(WireError, match="decode"):
        unpack(b"\xc1garbage")


def test_two_records_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Outcome:  # the name is taken by springtide.trace
        x: int

    with pytest.raises(TypeError, match="two records"):
        record(Outcome)


async def _handler(peer: Any, method: str, payload: dict[str, Any]) -> Any:
    match method:
        case "echo":
            return payload
        case "fail":
            raise ValueError("no such thing")
        case "slow":
            await asyncio.sleep(5)
    return None


def test_calls_run_concurrently_and_faults_reach_their_caller(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(str(tmp_path / "s"), _handler):
            async with Client.connect(str(tmp_path / "s"), name="peer", deadline_s=5) as client:
                slow = asyncio.create_task(client.call("slow", deadline_s=0.2))
                started = time.monotonic()
                assert await client.call("echo", deadline_s=1, a=(1, "x")) == {"a": (1, "x")}
                assert time.monotonic() - started < 0.15
                with pytest.raises(RemoteError, match="no such thing") as raised:
                    await client.call("fail", deadline_s=1)
                assert raised.value.kind == "ValueError"
                assert "_handler" in raised.value.remote_traceback
                with pytest.raises(DeadlineExceeded, match=r"peer did not answer slow within 0\.2 s"):
                    await slow

    asyncio.run(run())


def test_a_lost_peer_fails_pending_calls_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        server = await asyncio.start_unix_server(lambda r, w: w.close(), str(tmp_path / "s"))
        async with server, Client.connect(str(tmp_path / "s"), name="peer", deadline_s=5) as client:
            with pytest.raises(ConnectionLost, match="peer"):
                await client.call("echo", deadline_s=30)
            with pytest.raises(ConnectionLost, match="gone"):
                await client.call("echo", deadline_s=30)

    asyncio.run(run())


def test_an_answer_that_cannot_be_read_reaches_the_pending_call_in_words(tmp_path: Path) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"\x01\x00\x00\x00\xc1")
        await writer.drain()

    async def run() -> None:
        server = await asyncio.start_unix_server(garbage, str(tmp_path / "s"))
        async with server, Client.connect(str(tmp_path / "s"), name="peer", deadline_s=5) as client:
            with pytest.raises(ConnectionLost, match="peer sent what cannot be read: cannot decode 1 bytes"):
                await client.call("echo", deadline_s=30)

    asyncio.run(run())


def test_a_server_that_never_comes_is_named_with_the_time_waited(tmp_path: Path) -> None:
    async def run() -> None:
        async with Client.connect(str(tmp_path / "none"), name="engine", deadline_s=0.1):
            pass

    with pytest.raises(DeadlineExceeded, match=r"engine did not listen on .*none within 0\.1 s"):
        asyncio.run(run())
