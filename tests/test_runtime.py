"""The local runtime before its processes, and the life of one of them: what it needs and says."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.run_support import new_child

from springtide.config import ConfigError, make_config
from springtide.process import ProcessFailed
from springtide.runtime import ranks
from springtide.runtime.local import open_runtime, weights_directory
from springtide.runtime.ranks import Rank, keep_alive
from springtide.wire import ConnectionLost


def test_a_weights_directory_that_cannot_be_written_is_one_line_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    run = tmp_path / "run"

    async def start(configured: Path) -> None:
        config = make_config({"suites": [{"use": "db"}], "weights": {"dir": str(configured)}})
        async with open_runtime(config, run, tmp_path, checkpoint=None):
            raise AssertionError("it must not start")

    for configured in (tmp_path / "a file", tmp_path / "a file" / "below"):
        with pytest.raises(
            ConfigError, match=r"weights\.dir: cannot write .*a file.*(Not a directory|File exists).*name a dir"
        ) as raised:
            asyncio.run(start(configured))
        assert "\n" not in str(raised.value)
    assert not run.exists(), "no process had a log to write"


def test_what_a_killed_driver_left_of_its_weights_goes_and_another_runs_stays(tmp_path: Path) -> None:
    with weights_directory(tmp_path / "a", tmp_path / "shared") as mine:
        assert mine.is_dir()
    assert list((tmp_path / "shared").iterdir()) == []
    mine.mkdir()  # as where even the sweeper was killed
    with weights_directory(tmp_path / "b", tmp_path / "shared") as other:
        with weights_directory(tmp_path / "x" / ".." / "a", tmp_path / "shared") as again:
            assert set((tmp_path / "shared").iterdir()) == {other, again}
        assert other.is_dir()


def _rank(tmp_path: Path, name: str, *, restart: bool, **more: Any) -> Rank:
    return Rank(
        name, "tests.helpers_process:echo", {}, log_dir=tmp_path, socket_path=str(tmp_path / "s"), start_s=60.0,
        restart=restart, silent_s=0.5, **more,
    )  # fmt: skip


def test_a_stopped_rank_is_named_and_replaced_and_its_callers_hear_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        rank = _rank(tmp_path, "engine-0", restart=True)
        async with keep_alive([rank]):
            first = await rank.call("pid", deadline_s=5)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(ConnectionLost):
                await rank.call("pid", deadline_s=30)
            while rank.restarts == 0:
                await asyncio.sleep(0.01)
            await rank.wait_up()
            assert await rank.call("pid", deadline_s=5) != first

    asyncio.run(run())
    assert [r.message.split(" (")[0] for r in caplog.records] == [
        "engine-0 answered nothing for 0.5 s and was killed; it is started again"
    ]


def test_a_rank_that_is_killed_while_it_starts_again_is_started_once_more(tmp_path: Path) -> None:
    """Its second start was taken for a program that cannot start, and ended the run."""

    async def run() -> None:
        rank = _rank(tmp_path, "engine-0", restart=True)
        async with keep_alive([rank]):
            known: set[int] = set()
            for kill in range(3):
                pid = await new_child(known)
                if kill == 0:
                    await rank.call("pid", deadline_s=5)  # up; the next two are killed before they listen
                os.kill(pid, signal.SIGKILL)
                known.add(pid)
            while rank.restarts < 3:
                await asyncio.sleep(0.01)
            await rank.wait_up()
            assert await rank.call("pid", deadline_s=5) not in known

    asyncio.run(run())


def test_a_successor_is_not_asked_before_it_holds_what_its_predecessor_held(tmp_path: Path) -> None:
    """A pin reached an engine that was still loading, and ended the run; a drop came before the pin it was to undo."""
    done: list[str] = []

    async def prepare(rank: Rank) -> None:
        await rank.call("take", deadline_s=5, version=len(done))
        if done:
            await asyncio.sleep(0.5)
        done.append("prepared")

    async def run() -> None:
        rank = _rank(tmp_path, "engine-0", restart=True, prepare=prepare)
        async with keep_alive([rank]):
            os.kill(await rank.call("pid", deadline_s=5), signal.SIGKILL)
            while not (rank.restarts and rank.process):
                await asyncio.sleep(0.01)
            assert (await rank.call_again("args", deadline_s=5)) == {"took": (1,)}
            done.append("asked")

    asyncio.run(run())
    assert done == ["prepared", "prepared", "asked"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_struck_in_its_first_start_is_started_once_more(tmp_path: Path, how: signal.Signals) -> None:
    """One that was stopped before it listened was waited for until its deadline to start, which ended the run."""

    async def run() -> None:
        rank = _rank(tmp_path, "engine-0", restart=True)

        async def strike() -> None:
            os.kill(await new_child(set()), how)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(strike())
            async with asyncio.timeout(30), keep_alive([rank]):
                assert rank.restarts == 1
                await rank.call("pid", deadline_s=5)

    asyncio.run(run())


def test_a_rank_that_never_comes_up_again_ends_the_run_however_long_its_starts_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts that failed slower than deaths are forgotten went on for ever."""
    monkeypatch.setattr(ranks, "_WINDOW_S", 0.01)

    async def run() -> None:
        rank = Rank(
            "engine-0", "tests.helpers_process:once", {"marker": str(tmp_path / "marker")}, log_dir=tmp_path,
            socket_path=str(tmp_path / "s"), start_s=60.0, restart=True, silent_s=60.0,
        )  # fmt: skip
        async with asyncio.timeout(60), keep_alive([rank]):
            os.kill(await rank.call("pid", deadline_s=5), signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(ProcessFailed, match=r"(?s)engine-0 ended with status 1 while starting.*it was here before"):
        asyncio.run(run())


def test_a_stopped_rank_that_may_not_be_restarted_ends_the_run_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        rank = _rank(tmp_path, "trainer", restart=False)
        async with keep_alive([rank]):
            os.kill(await rank.call("pid", deadline_s=5), signal.SIGSTOP)
            await rank.call("pid", deadline_s=30)

    with pytest.raises(ProcessFailed, match=r"^trainer answered nothing for 0\.5 s and was killed; "):
        asyncio.run(run())
