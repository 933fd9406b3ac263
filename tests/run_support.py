"""What the tests of whole runs share: configurations over the tiny model, and runs in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from springtide.config import Config, make_config

TESTS = Path(__file__).parent


def run_config(model: Path, runs: Path, name: str = "run", *, suite: str = "Letters", **tables: Any) -> Config:
    """A run of the tiny model on `tests/letters.py`; `tables` are merged over the defaults here."""
    base: dict[str, Any] = {
        "run": {"dir": str(runs), "name": name, "steps": 3},
        "model": {"path": str(model), "context": 256},
        "suites": [{"use": f"{TESTS / 'letters.py'}:{suite}"}],
        "rollout": {"max_new_tokens": 12, "group": {"n": 4}, "concurrency": 8},
        "trainer": {"groups": 4, "lr": 3e-3},
        "schedule": {"strict": True},
        "eval": {"at_ends": False},
        "observe": {"report": False},
    }
    for table, values in tables.items():
        base[table] = {**base[table], **values} if isinstance(base.get(table), dict) else values
    return make_config(base)


def records(config: Config, kind: str = "step") -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def start_run(
    config: Config,
    *,
    resume: bool = False,
    output: Path | None = None,
    scratch: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """The run through the command line, in a process that may be killed.

    output: a file for what it prints (a pipe that nobody reads holds up a long run). scratch: its temporary files. env:
    its environment, if not ours.
    """
    file = config.run_dir.with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config.to_toml())
    return subprocess.Popen(
        [sys.executable, "-m", "springtide.cli.main", "train", str(file), *(["--resume"] if resume else [])],
        stdout=subprocess.PIPE if output is None else output.open("a"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**(env or os.environ), **({} if scratch is None else {"TMPDIR": str(scratch)})},
    )


def wait_for(what: str, condition: Any, within_s: float = 60.0) -> Any:
    """Poll until `condition()` is true; its value. Fails by name."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {within_s:g} s")


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    found: set[int] = set()
    queue = [pid]
    while queue:
        try:
            for task in Path(f"/proc/{queue.pop()}/task").iterdir():
                children = set(map(int, (task / "children").read_text().split()))
                queue += children - found
                found |= children
        except OSError:
            continue
    return found


def command(pid: int) -> list[str]:
    """What it was started with; empty if it is gone, or not there yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


async def new_child(known: set[int]) -> int:
    """The process of a rank of this process that is not among `known`, as soon as there is one."""
    while True:
        for pid in descendants(os.getpid()) - known:
            if "springtide.process" in command(pid):
                return pid
        await asyncio.sleep(0.001)


def alive(pids: set[int]) -> set[int]:
    """Those that still run (a zombie does not)."""
    running = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z":
                running.add(pid)
        except OSError:
            continue
    return running


def program(pid: int) -> str:
    """Which program of the run a process is: its log file's name."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        return ""


def listening(pids: set[int]) -> dict[str, str]:
    """Socket -> its port and address over TCP, or "unix", of all that these processes listen on."""
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(descriptor))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                found[f"socket:[{inode}]"] = local
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *_ = line.split()
        if int(flags, 16) & 0x10000:
            found[f"socket:[{inode}]"] = "unix"
    return {socket: where for socket, where in found.items() if socket in held}
