"""The wire: values survive it, faults and lost peers reach the caller in words."""

from __future__ import annotations

import asyncio
import json
import os
import stat
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
    path_of,
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


@pytest.mark.alone
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


def _tcp(file: Path, ports: str = "0-0") -> str:
    return f"tcp://127.0.0.1:{ports}{file}"


def test_a_server_over_tcp_is_found_by_its_file_and_again_when_it_moved(tmp_path: Path) -> None:
    file = tmp_path / "engine-0"
    assert path_of(_tcp(file)) == str(file) and path_of(str(file)) == str(file)

    async def run() -> None:
        ports = []
        for _ in range(2):
            async with serve(_tcp(file), _handler):
                assert stat.S_IMODE(os.stat(file).st_mode) == 0o600, "who may read it may call"
                ports.append(json.loads(file.read_text())["port"])
                async with Client.connect(str(file), name="server", deadline_s=5) as client:
                    assert await client.call("echo", deadline_s=5, value=np.arange(3)) is not None
                    peer = client._writer.get_extra_info("peername")
                    assert peer == ("127.0.0.1", ports[-1])
            # its file stays; who comes while nobody listens waits for the next
            with pytest.raises(DeadlineExceeded, match=r"server did not listen on .*engine-0 within 0.1 s"):
                await Client.open(str(file), name="server", deadline_s=0.1)

    asyncio.run(run())


@pytest.mark.parametrize("stranger", ["client", "server"])
def test_neither_side_of_a_tcp_connection_talks_to_one_that_does_not_know_the_key(
    tmp_path: Path, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A port may be another program's by now: it learns nothing, and nothing of what it says is decoded."""
    file, calls = tmp_path / "engine-0", []

    async def handler(peer: Any, method: str, payload: dict[str, Any]) -> None:
        calls.append(method)

    async def run() -> None:
        async with serve(_tcp(file), handler):
            place = json.loads(file.read_text())
            if stranger == "client":
                file.write_text(json.dumps({**place, "key": "00" * 32}))
                with pytest.raises(DeadlineExceeded, match=r"does not know the key|left before it proved"):
                    await Client.open(str(file), name="server", deadline_s=0.2)
                reader, writer = await asyncio.open_connection(place["host"], place["port"])
                writer.write(pack((0, 1, "echo", {})) * 100)
                received = await reader.read()
                assert place["key"] not in received.hex() and len(received) <= 64
                writer.close()
            else:
                heard: list[bytes] = []

                async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    writer.write(os.urandom(64))
                    heard.append(await reader.read())
                    writer.close()

                async with await asyncio.start_server(impostor, "127.0.0.1", 0) as other:
                    file.write_text(json.dumps({**place, "port": other.sockets[0].getsockname()[1]}))
                    with pytest.raises(DeadlineExceeded, match="does not know the key"):
                        await Client.open(str(file), name="server", deadline_s=0.2)
                    assert heard and all(place["key"] not in h.hex() and len(h) <= 64 for h in heard)

    asyncio.run(run())
    assert calls == []
    if stranger == "client":
        assert "refused a connection from" in caplog.text


def test_a_server_without_a_free_port_says_which_it_tried(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(_tcp(tmp_path / "a"), _handler):
            taken = json.loads((tmp_path / "a").read_text())["port"]
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, no port {taken} is free"):
                async with serve(_tcp(tmp_path / "b", f"{taken}-{taken}"), _handler):
                    pass
            async with serve(_tcp(tmp_path / "b", f"{taken}-{taken + 20}"), _handler):
                assert taken < json.loads((tmp_path / "b").read_text())["port"] <= taken + 20

    asyncio.run(run())
