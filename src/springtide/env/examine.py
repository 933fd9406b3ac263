"""The checker in a child process: whatever an author's code does to its process, there is a report.

Owns: the child, and what is said when it dies or does not answer. Invariants: the author's file is imported in the
child only; what runs there is noted in a file before it runs, so a death is one finding that names the tool or the
phase; after a death the remaining checks are skipped, not guessed.
Called by: `cli.doctor`, through `examine`; the child runs `main`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from springtide.env.check import Checker, Report, Verdict
from springtide.env.registry import load_suite
from springtide.env.suite import SPLITS, Suite, SuiteError
from springtide.process import Process, start_process
from springtide.wire import ConnectionLost, Peer, RemoteError, serve

CALL_S = 600.0
_BETWEEN_S = 600.0  # our own code between two calls of the author's
_GRACE_S = 15.0  # a call is stopped at its deadline inside the child: one that is later than this blocks the child
_LOOK_S = 0.1
_FOREVER_S = 1e9  # the watch over the notes is the deadline
_NOTED, _NOTE_BYTES = 300, 4096  # characters of what runs; a character outside ASCII may take 12 bytes in JSON
Told = Callable[[str, str, str, Verdict | None], None]


async def examine(
    use: str,
    *,
    level: str | None = None,
    splits: Sequence[str] = SPLITS,
    tasks: int = 8,
    call_s: float = CALL_S,
    log: Path | None = None,
    told: Told = lambda suite, version, level, verdict: None,
) -> list[Report]:
    """Examine the suite `use` in a child process a level; a report a level, whatever becomes of the children.

    `call_s` bounds one call of the author's code beside its own deadline; `log` takes what the code prints; `told`
    hears of each level (with None) and of each verdict at once. Raises: SuiteError if it cannot be loaded.
    """
    reports: list[Report] = []
    levels = [level]
    while levels:
        with tempfile.TemporaryDirectory(prefix="springtide-doctor-") as directory:
            notes = Path(directory, "notes")
            notes.touch()
            args = {"use": use, "level": levels.pop(0), "tasks": tasks, "splits": list(splits), "notes": str(notes)}
            log_path = log or Path(directory, "log")
            async with start_process("doctor", "springtide.env.examine:main", args, log_path=log_path) as process:
                child = _Child(process, notes, call_s)
                loaded = await _load(child, use)
                if args["level"] is None:  # the first child of several: only it knows the levels
                    levels = list(loaded["levels"][1:])
                reports.append(await _run_checks(child, loaded, told))
    return reports


async def _run_checks(child: _Child, loaded: dict[str, Any], told: Told) -> Report:
    """Every check in turn, until the child dies: the rest are skipped then."""
    suite, version, level = loaded["suite"], loaded["version"], loaded["level"]
    told(suite, version, level, None)
    verdicts: list[Verdict] = []
    sizes: dict[str, int] = {}
    died = ""
    for check in loaded["checks"]:
        if died:
            verdict = Verdict(check, "skipped", f"the process had died during {died}")
        else:
            try:
                answer = await child.call("check", name=check)
                verdict, sizes = Verdict(*answer["verdict"]), answer["sizes"]
            except _Died as death:
                verdict, died = Verdict(check, "failed", str(death)), check
        verdicts.append(verdict)
        told(suite, version, level, verdict)
    return Report(suite, version, level, sizes, tuple(verdicts))


async def _load(child: _Child, use: str) -> dict[str, Any]:
    try:
        return await child.call("load")
    except _Died as death:
        raise SuiteError(f"suite {use}: {death}") from None
    except RemoteError as error:
        known = error.kind == "SuiteError"
        raise SuiteError(error.message if known else f"suite {use}: {error.kind}: {error.message}") from None


class _Died(Exception):
    """The child ended, or was killed because it did not answer. One line: how, and what ran then."""


class _Child:
    def __init__(self, process: Process, notes: Path, call_s: float) -> None:
        self._process, self._notes, self._call_s = process, notes, call_s

    async def call(self, method: str, **payload: Any) -> Any:
        """Raises: _Died, RemoteError."""
        call = asyncio.create_task(self._process.client.call(method, deadline_s=_FOREVER_S, **payload))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=_LOOK_S)
                late = self._late()
                if late and not call.done():
                    self._process.kill()
                    raise _Died(late)
            return call.result()
        except ConnectionLost:
            await self._process.exited.wait()
            raise _Died(f"the process died with {_status(self._process.returncode)} {self._read()[0]}") from None
        finally:
            call.cancel()

    def _late(self) -> str:
        """What has been running for too long; "" if nothing has."""
        what, seconds, since = self._read()
        allowed = _BETWEEN_S if seconds is None else min(seconds, self._call_s)
        spent = time.monotonic() - since
        return f"no answer for {spent:.3g} s {what}; the process was killed" if spent > allowed + _GRACE_S else ""

    def _read(self) -> tuple[str, float | None, float]:
        text = self._notes.read_text().strip()
        return tuple(json.loads(text)) if text else ("while starting", None, time.monotonic())


def _status(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


# --- in the child ----------------------------------------------------------------------------------------------------


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Answer `load`, then `check` by name, until cancelled. `args`: use, level, tasks, splits, notes."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    notes = os.open(args["notes"], os.O_WRONLY)

    def note(what: str, seconds: float | None) -> None:
        # One write of fixed length: the parent never reads half of it, and it outlives the process.
        text = json.dumps([what[:_NOTED], seconds, time.monotonic()])
        os.pwrite(notes, text.encode().ljust(_NOTE_BYTES), 0)

    checkers: list[Checker] = []

    async def handle(peer: Peer, method: str, payload: dict[str, Any]) -> Any:
        if method == "load":
            note(f"on import of {args['use']}", CALL_S)
            suite = load_suite(args["use"])
            level = _choose(suite, args["level"])
            checkers.append(Checker(args["use"], suite, level, args["tasks"], args["splits"], note))
            told = {"suite": suite.name, "version": suite.version, "levels": suite.levels, "level": level}
            return {**told, "checks": tuple(checkers[0].checks)}
        note(f"during the check {payload['name']}", None)
        verdict = await checkers[0].run(payload["name"])
        return {"verdict": (verdict.check, verdict.verdict, verdict.detail), "sizes": checkers[0].sizes}

    async with serve(socket_path, handle):
        await asyncio.Event().wait()


def _choose(suite: Suite, level: str | None) -> str:
    if not suite.levels:
        raise SuiteError(f"suite {suite.name} has no levels; name at least one in levels = (...)")
    if level is not None and level not in suite.levels:
        raise SuiteError(f"suite {suite.name} has no level {level!r}; it has {', '.join(suite.levels)}")
    return level or suite.levels[0]
