"""Environment workers: what their deaths, leaks and replacements cost, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.run_support import new_child

from springtide.env import EnvironmentUnavailable, InProcessClient, Message
from springtide.env.local import LocalClient, LocalRunner
from springtide.process import ProcessFailed, start_process
from springtide.trace import ToolCall

PROBE = str(Path(__file__).with_name("env_probe.py"))
ALL = tuple(f"{PROBE}:{name}" for name in ("Probe", "Alone", "Short", "Library"))


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    path.touch()
    monkeypatch.setenv("SPRINGTIDE_PROBE", str(path))
    return path


async def opened(client: Any, suite: str = "probe", index: int = 0) -> Any:
    return await client.open((await client.catalog(suite, "train", "default"))[index], 0, 0, 0, 30.0)


async def call(session: Any, turn: int, tool: str, **arguments: Any) -> str:
    message = Message("assistant", tool_calls=(ToolCall("c", tool, json.dumps(arguments)),))
    return (await session.act(message, turn)).messages[0].text


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_killed_worker_takes_only_its_sessions_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalRunner(ALL, 2, tmp_path) as runner, LocalClient(runner.addresses) as client:
            sessions = [await opened(client) for _ in range(4)]
            pids = [int(await call(session, 0, "pid")) for session in sessions]
            assert set(pids) == set(runner.pids), "sessions are spread over the workers"
            busy = asyncio.create_task(call(sessions[0], 1, "sleep", seconds=0.6))
            await asyncio.sleep(0.1)
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(EnvironmentUnavailable) as caught:
                await busy
            assert caught.value.cause == "worker_lost"
            for session, pid in zip(sessions, pids):
                if pid == pids[0]:
                    for lost in (session.act(Message("assistant", "hm"), 9), session.finish("done"), session.renew()):
                        with pytest.raises(EnvironmentUnavailable, match="worker_lost"):
                            await lost
                    await session.close()
                else:
                    assert await call(session, 1, "note", text="alive") == "1 notes"
            await until(lambda: len(runner.pids) == 2 and pids[0] not in runner.pids)
            more = [await opened(client) for _ in range(4)]
            assert {int(await call(session, 0, "pid")) for session in more} == set(runner.pids)
            assert runner.counts["lost"] == 1

    asyncio.run(main())


def test_a_session_that_is_forgotten_is_dropped_when_its_lease_ends_and_a_held_one_is_not(
    tmp_path: Path, trace: Path
) -> None:
    # OpenEnv#1000: sessions leaked until no slot was left.
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path, lease_s=3.0) as runner, LocalClient(runner.addresses) as client:
            held, forgotten = await opened(client), await opened(client)
            assert forgotten.id != held.id
            del forgotten
            gc.collect()
            await until(lambda: runner.counts.get("expired") == 1)
            await asyncio.sleep(3.5)
            assert await call(held, 0, "note", text="here") == "1 notes"
            await held.close()
            assert runner.counts["expired"] == 1
            assert trace.read_text().count("close") == 2

    asyncio.run(main())


def test_sessions_of_a_client_that_went_away_are_closed_at_once(tmp_path: Path, trace: Path) -> None:
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path) as runner:
            async with LocalClient(runner.addresses) as client:
                for _ in range(3):
                    await opened(client)
            await until(lambda: trace.read_text().count("close") == 3)
            await until(lambda: runner.counts.get("abandoned") == 3)

    asyncio.run(main())


def test_a_call_that_never_ends_gets_its_worker_replaced_after_the_others_finished(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path) as runner, LocalClient(runner.addresses) as client:
            hung, other = await opened(client), await opened(client)
            old = int(await call(other, 0, "pid"))
            await call(hung, 0, "doze", seconds=60)
            outcome = await hung.finish("done")
            assert (outcome.status, outcome.cause) == ("environment_error", "tool")
            await hung.close()
            await until(lambda: len(runner.pids) == 2)
            await asyncio.sleep(0.6)
            fresh = await opened(client)
            assert int(await call(fresh, 0, "pid")) != old
            assert old in runner.pids, "it still holds a session"
            assert await call(other, 1, "earn", amount=1) == '{"earned": 1.0}'
            assert (await other.finish("done")).reward == 1.0
            await other.close()
            await until(lambda: old not in runner.pids)
            assert not psutil.pid_exists(old)
            assert (runner.counts["hung"], runner.counts["replaced"]) == (1, 1)
            assert "lost" not in runner.counts

    asyncio.run(main())


def test_a_blocked_event_loop_is_ended_and_its_log_names_the_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path, block_s=1.0) as runner, LocalClient(runner.addresses) as client:
            session = await opened(client)
            started = time.monotonic()
            with pytest.raises(EnvironmentUnavailable, match="worker_lost"):
                await call(session, 0, "block", seconds=30)
            assert time.monotonic() - started < 5
            await session.close()
            assert "in block" in (tmp_path / "env-w0.log").read_text()
            again = await opened(client)
            assert await call(again, 0, "note", text="a") == "1 notes"

    asyncio.run(main())


def test_an_isolated_episode_dies_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path) as runner, LocalClient(runner.addresses) as client:
            common, first, second = await opened(client), await opened(client, "alone"), await opened(client, "alone")
            pids = [int(await call(session, 0, "pid")) for session in (common, first, second)]
            assert len(set(pids)) == 3 and pids[0] in runner.pids
            with pytest.raises(EnvironmentUnavailable, match="worker_lost"):
                await call(first, 1, "die")
            await first.close()
            with pytest.raises(EnvironmentUnavailable) as caught:
                await call(second, 1, "block", seconds=30)
            assert caught.value.cause == "tool"
            await until(lambda: not psutil.pid_exists(pids[2]))
            await second.close()
            assert await call(common, 1, "note", text="a") == "1 notes"
            third = await opened(client, "alone")
            await third.act(Message("assistant", tool_calls=(ToolCall("c", "earn", '{"amount": 1}'),)), 0)
            assert (await third.finish("done")).success is True
            child = int(await call(await opened(client, "alone"), 0, "pid"))
            await third.close()
            assert "lost" not in runner.counts
        await until(lambda: not psutil.pid_exists(child))

    asyncio.run(main())


def test_a_worker_is_recycled_after_its_share_of_episodes(tmp_path: Path) -> None:
    # AgentEvolver#30: environment processes grew without bound.
    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path) as runner, LocalClient(runner.addresses) as client:
            first = runner.pids[0]
            for _ in range(3):
                session = await opened(client, "short")
                await session.finish("done")
                await session.close()
            await until(lambda: first not in runner.pids and len(runner.pids) == 1)
            assert (await opened(client, "short")).messages
            assert runner.counts["replaced"] == 1 and "lost" not in runner.counts

    asyncio.run(main())


def test_shared_resources_are_opened_once_a_process_and_closed(tmp_path: Path, trace: Path) -> None:
    async def visits(client: Any) -> list[str]:
        sessions = await asyncio.gather(*(opened(client, "library") for _ in range(3)))
        return sorted(session.messages[0].text for session in sessions)

    async def main() -> None:
        async with InProcessClient(ALL) as client:
            assert await visits(client) == ["visit 1", "visit 2", "visit 3"]
        assert trace.read_text().split("\n")[:2] == ["shelf opened", "shelf closed"]
        async with LocalRunner(ALL, 1, tmp_path) as runner, LocalClient(runner.addresses) as client:
            assert await visits(client) == ["visit 1", "visit 2", "visit 3"]
        assert trace.read_text().count("shelf closed") == 2

    asyncio.run(main())


def test_a_shared_resource_that_fails_to_open_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "no shelf").touch()
        async with InProcessClient(ALL) as client:
            with pytest.raises(EnvironmentUnavailable, match="no shelf") as caught:
                await opened(client, "library")
            assert caught.value.cause == "setup"
            assert (await opened(client, "library")).messages[0].text == "visit 1"

    asyncio.run(main())


def test_a_missing_suite_stops_the_start_with_one_clear_reason(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ProcessFailed, match=r"no suite 'chess'; there are .*db"):
            async with LocalRunner(["chess"], 2, tmp_path):
                pass

    asyncio.run(main())


def test_a_worker_that_is_stopped_in_its_first_start_is_started_once_more(tmp_path: Path) -> None:
    async def stop() -> None:
        os.kill(await new_child(set()), signal.SIGSTOP)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop())
            async with asyncio.timeout(30), LocalRunner(ALL, 1, tmp_path, silent_s=0.5) as runner:
                assert len(runner.pids) == 1

    asyncio.run(main())


def test_a_worker_that_cannot_start_again_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    suite = tmp_path / "flaky.py"
    suite.write_text(
        "from pathlib import Path\n"
        f"from env_probe import Quiz\n"
        f"if Path({str(tmp_path / 'broken')!r}).exists(): raise ImportError('the licence ran out')\n"
        "class Flaky(Quiz): pass\n"
    )

    async def main() -> None:
        async with LocalRunner([f"{suite}:Flaky"], 1, tmp_path) as runner:
            (tmp_path / "broken").touch()
            os.kill(runner.pids[0], signal.SIGKILL)
            await asyncio.sleep(50)

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    try:
        with pytest.raises(ProcessFailed, match="the licence ran out"):
            asyncio.run(main())
    finally:
        del os.environ["PYTHONPATH"]


def test_a_place_that_is_gone_for_good_is_tried_once(tmp_path: Path) -> None:
    starts: list[str] = []

    def launch(name: str, *args: Any, **options: Any) -> Any:
        starts.append(name)
        if len(starts) > 1:
            raise ProcessFailed("no node has room", final=True)
        return start_process(name, *args, **options)

    async def main() -> None:
        async with LocalRunner(ALL, 1, tmp_path, launch=launch) as runner:
            os.kill(runner.pids[0], signal.SIGKILL)
            await asyncio.sleep(20)

    with pytest.raises(ProcessFailed, match="no node has room"):
        asyncio.run(main())
    assert len(starts) == 2


def test_an_error_in_the_runners_block_passes_unchanged_and_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []

    async def main() -> None:
        async with LocalRunner(ALL, 2, tmp_path) as runner, LocalClient(runner.addresses) as client:
            pids.extend(runner.pids)
            await call(await opened(client), 0, "doze", seconds=60)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(main())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_parent_leaves_no_environment_process(tmp_path: Path) -> None:
    # rllm#568: workers outlived their run.
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from springtide.env.local import LocalClient, LocalRunner\n"
        "async def main():\n"
        f"    async with LocalRunner([{ALL[1]!r}], 1, Path({str(tmp_path)!r})) as r, LocalClient(r.addresses) as c:\n"
        "        s = await c.open((await c.catalog('alone', 'train', 'default'))[0], 0, 0, 0, 30.0)\n"
        "        print('open', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "open\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    found = sorted(child.name() for child in children)
    assert len(found) == 4 and found[2:] == ["sh", "sh"], "a worker, the isolated episode's, and what sweeps after both"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
