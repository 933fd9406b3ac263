"""`events.jsonl` of a run as its pages read it: on from where they stopped, as far as the time they have lets.

Owns: the place in the file. Invariants: a byte is read once; a line that is still being written is left for later; what
is no event, torn or another's, is counted and left out; a file that was begun anew is read anew.
Called by: `observe.{report,view}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from springtide.observe.timeline import Timeline
from springtide.schedule.events import Event, SwitchRole, event_from_json

_CHUNK = 1 << 18  # bytes at once: some thousand lines, a few hundredths of a second
_HEAD = b'{"kind": "'
# Actions, of which the state hears nothing: what came of them is an event.
_WISHES = frozenset({b"Admit", b"Route", b"Pause", b"Resume", b"Abort", b"ChoosePipeline", b"SetFetch", b"Sync"})
_LARGE = 1 << 53  # no count is as large


def _whole(value: Any) -> bool:
    return isinstance(value, int) and -_LARGE < value < _LARGE


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)


_RIGHT: dict[
    str, Callable[[Any], bool]
] = {  # whether a value is of the type that a field of an event is annotated with
    "float": _number,
    "int": _whole,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Role": lambda value: value in ("rollout", "reference", "trainer"),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(_whole, value)),
    "dict[str, float]": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_whole, value.values())),
}
_FIELDS = {
    kind: [(field.name, _RIGHT.get(str(field.type), _RIGHT["str"])) for field in fields(kind)]
    for kind in (*Event.__args__, SwitchRole)
}


class EventLog:
    """Follows one file. unread: the share of its bytes that the last read left; skipped: lines that are no event."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file = 0  # its inode
        self._begin()

    def _begin(self) -> None:
        self.timeline, self._at = Timeline(), 0
        self.skipped, self.unread = 0, 0.0

    @contextlib.contextmanager
    def read(self, budget_s: float = math.inf) -> Iterator[Timeline]:
        """Read on for at most about `budget_s`, and hold the timeline still for the block."""
        with self._lock:
            with contextlib.suppress(OSError):  # no file yet, or no longer
                self._read(time.monotonic() + budget_s)
            yield self.timeline.settle()

    def _read(self, until: float) -> None:
        with open(self._path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._at:
                self._file = stat.st_ino
                self._begin()
            file.seek(self._at)
            while chunk := file.read(_CHUNK):
                whole = chunk.rfind(b"\n") + 1
                if not whole and len(chunk) < _CHUNK:
                    break
                for line in chunk[:whole].split(b"\n"):
                    self._line(line)
                self._at += whole or len(chunk)  # a line without an end within a chunk is none of ours
                file.seek(self._at)
                if time.monotonic() > until:
                    break
            self.unread = max(0.0, 1 - self._at / stat.st_size) if stat.st_size else 0.0

    def _line(self, line: bytes) -> None:
        if line.startswith(_HEAD) and line[len(_HEAD) : line.find(b'"', len(_HEAD))] in _WISHES:
            return
        if not line.strip():
            return
        event: Any = None
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            data = json.loads(line.decode())
            event = SwitchRole(data["rank"], data["role"]) if data["kind"] == "SwitchRole" else event_from_json(data)
        if event is None or not all(right(getattr(event, name)) for name, right in _FIELDS[type(event)]):
            self.skipped += 1
        else:
            self.timeline.feed(event)
