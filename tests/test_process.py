"""Children: they start or say why not, and nothing outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest
from tests.run_support import command, descendants, wait_for

from springtide.process import ProcessFailed, scratch_directory, start_process

HELPERS = "tests.helpers_process"


def _gone(pid: int, within_s: float = 3.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_child_is_called_and_ends_with_its_block(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        async with start_process("child", f"{HELPERS}:echo", {"a": 1}, log_path=tmp_path / "log") as child:
            assert await child.client.call("args", deadline_s=5) == {"a": 1}
            grandchild = await child.client.call("spawn", deadline_s=5)
            return child.pid, grandchild

    child, grandchild = asyncio.run(run())
    assert _gone(child)
    assert _gone(grandchild)


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def run(entry: str, deadline_s: float) -> None:
        async with start_process("engine", entry, {}, log_path=tmp_path / "log", deadline_s=deadline_s):
            pass

    with pytest.raises(
        ProcessFailed, match=r"(?s)engine ended with status 1 while starting.*the model file is missing"
    ):
        asyncio.run(run(f"{HELPERS}:broken", 30))
    with pytest.raises(ProcessFailed, match=r"engine did not listen .* within 1\.5 s"):
        asyncio.run(run(f"{HELPERS}:never", 1.5))


def test_a_child_that_cannot_be_made_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(FileNotFoundError):
            async with start_process("child", f"{HELPERS}:echo", {}, log_path=tmp_path / "log"):
                pass
        assert len(os.listdir("/proc/self/fd")) == len(before)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    asyncio.run(run())


def test_a_child_runs_in_the_interpreter_it_is_given(tmp_path: Path) -> None:
    """Programs whose dependencies differ have virtual environments of their own."""
    ours = sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (other,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (other / "ours.pth").write_text(f"{ours}\nimport site; site.addsitedir({ours!r})\n")
    python = str(tmp_path / "venv" / "bin" / "python")

    async def run(python: str) -> str:
        async with start_process("vllm", f"{HELPERS}:echo", {}, log_path=tmp_path / "log", python=python) as child:
            return await child.client.call("prefix", deadline_s=5)

    assert asyncio.run(run(python)) == str(tmp_path / "venv") != sys.prefix
    with pytest.raises(ProcessFailed, match=r"^vllm: there is no interpreter .*gone/bin/python; make its virtual"):
        asyncio.run(run(str(tmp_path / "gone" / "bin" / "python")))


def test_a_watched_child_is_killed_when_it_is_stopped_and_not_when_it_is_busy(tmp_path: Path) -> None:
    """A stopped engine was waited for as long as a turn may take, and nothing was said."""
    bound_s = 0.5

    async def run() -> None:
        log = tmp_path / "log"
        async with start_process("engine-0", f"{HELPERS}:echo", {}, log_path=log, silent_s=bound_s) as child:
            for busy in ("block", "compute"):
                begun = time.monotonic()
                await child.client.call(busy, deadline_s=60)
                assert time.monotonic() - begun > bound_s, busy
            os.kill(child.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            async with asyncio.timeout(10):
                await child.exited.wait()
            assert time.monotonic() - stopped >= 0.8 * bound_s
            assert child.returncode == -signal.SIGKILL
            assert str(child.failure()).startswith("engine-0 answered nothing for 0.5 s and was killed; ")

    asyncio.run(run())


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_die_with_a_killed_parent(tmp_path: Path, how: signal.Signals, stopped: bool) -> None:
    """rllm#568, vllm#16259: a killed driver must leave no worker behind, nor one that cannot see it, nor its own."""
    script = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from springtide.process import start_process
        async def run():
            log = Path({str(tmp_path / "log")!r})
            async with start_process("child", "{HELPERS}:echo", {{}}, log_path=log) as child:
                grandchild = await child.client.call("spawn", deadline_s=10)
                print(child.pid, grandchild, flush=True)
                await asyncio.sleep(600)
        asyncio.run(run())
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    if stopped:
        os.kill(child, signal.SIGSTOP)
        while Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] != "T":
            time.sleep(0.01)
    os.kill(parent.pid, how)
    parent.wait(10)
    assert _gone(child)
    assert _gone(grandchild)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_scratch_directory_goes_with_its_process_however_that_ends(
    tmp_path: Path, how: signal.Signals | None
) -> None:
    """A killed driver left its sockets in /tmp, and its weights, gigabytes perhaps, in shared memory."""
    script = textwrap.dedent(f"""
        from pathlib import Path
        from springtide.process import scratch_directory
        with scratch_directory(parent=Path({str(tmp_path)!r})) as path:
            (path / "weights").write_text("w")
            print(path, flush=True)
            input()
    """)
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None and maker.stdin is not None
    path = Path(maker.stdout.readline().strip())
    assert (path / "weights").exists()
    if how is None:
        maker.stdin.write("\n")
        maker.stdin.flush()
    else:
        os.kill(maker.pid, how)
    maker.wait(10)
    until = time.monotonic() + 5.0
    while path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_directory_leaves_no_process_and_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/there/token")  # a Ray's that dies with us: not its sweeper's to kill
    before = len(os.listdir("/proc/self/fd"))
    with scratch_directory() as path:
        sweepers = wait_for(  # a process that is just being started has no name yet
            "the sweeper", lambda: [p for p in descendants(os.getpid()) if str(path) in command(p)], within_s=5
        )
        assert len(sweepers) == 1
        assert b"RAY_AUTH_TOKEN_PATH" not in Path(f"/proc/{sweepers[0]}/environ").read_bytes()
    assert _gone(sweepers[0])
    assert len(os.listdir("/proc/self/fd")) == before
