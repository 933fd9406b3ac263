"""What a person watches while a run trains: one table that is redrawn, or plain lines where there is no terminal.

Owns: the terminal. Invariants: it only shows records that are also in `metrics.jsonl`; without a terminal every step is
one line, so that a log reads well.
Called by: `observe.metrics`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from springtide.config import Config
from springtide.observe.metrics import Display

_BARS = "▁▂▃▄▅▆▇█"
_REDRAW_S, _SAY_S = 0.5, 10.0  # what is waited for: redrawn at most, said in a line at most, this often
_RECENT = 48  # steps of the sparkline


class Quiet:
    """Shows nothing but notes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def waiting(self, reason: str, admission: str) -> None: ...

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


class Lines(Quiet):
    """One line a step and an evaluation."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self._steps = steps
        self._said = time.monotonic()

    def waiting(self, reason: str, admission: str) -> None:
        if time.monotonic() - self._said > _SAY_S:
            self._said = time.monotonic()
            self._console.print(f"waiting for: {_blocked(reason, admission)}", markup=False, soft_wrap=True)

    def step(self, record: dict[str, Any]) -> None:
        suites = " ".join(f"{k} {v:.0%}" for k, v in record["success"].items() if k != "mean")
        self._said = time.monotonic()
        success = _share(record["success"]["mean"])
        self._console.print(
            f"step {record['step']}/{self._steps} {record['t'] / 60:.1f} min  success {success} ({suites})  "
            f"{record['goodput_tokens_per_s']:.0f} tok/s  staleness {record['staleness']['mean']:.1f}  "
            f"wait {_waits(record)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def evaluation(self, record: dict[str, Any]) -> None:
        self._console.print(_evaluation_line(record), markup=False, highlight=False, soft_wrap=True)


class Board(Quiet):
    """A live table."""

    def __init__(self, console: Console, steps: int, live: Live) -> None:
        super().__init__(console)
        self._steps, self._live = steps, live
        self._history: list[float] = []
        self._evaluations: list[str] = []
        self._notes: list[str] = []
        self._record: dict[str, Any] | None = None
        self._waiting = "the first groups"
        self._drawn = 0.0

    def step(self, record: dict[str, Any]) -> None:
        self._record = record
        if record["success"]["mean"] is not None:  # None where no episode ended since the last step
            self._history.append(record["success"]["mean"])
        self._draw()

    def evaluation(self, record: dict[str, Any]) -> None:
        self._evaluations.append(_evaluation_line(record))
        self._draw()

    def waiting(self, reason: str, admission: str) -> None:
        self._waiting = _blocked(reason, admission)
        if time.monotonic() - self._drawn > _REDRAW_S:
            self._draw()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        parts: list[Any] = [Text(line) for line in self._evaluations]
        record = self._record
        if record is not None:
            table = Table.grid(padding=(0, 2))
            table.add_row("step", f"{record['step']}/{self._steps}", "time", f"{record['t'] / 60:.1f} min")
            table.add_row("success", _share(record["success"]["mean"]), "trend", _spark(self._history[-_RECENT:]))
            for suite, value in record["success"].items():
                if suite != "mean":
                    table.add_row(f"  {suite}", f"{value:.1%}", "share", f"{record['mixture'].get(suite, 0):.0%}")
            table.add_row(
                "goodput", f"{record['goodput_tokens_per_s']:.0f} loss tokens/s", "step", f"{record['step_s']:.1f} s"
            )
            table.add_row(
                "staleness",
                f"{record['staleness']['mean']:.2f} (max {record['staleness']['max']})",
                "engine busy",
                f"{record['engine']['busy_share']:.0%}",
            )
            table.add_row("trainer waits", _waits(record), "dropped", _counts(record["dropped"]))
            table.add_row("env errors", _counts(record["env_errors"]), "memory", f"{record['pss_mib'] / 1024:.1f} GiB")
            parts.append(table)
        parts.append(Text(f"waiting for: {self._waiting}", style="dim"))
        parts += [Text(f"note: {note}", style="yellow") for note in self._notes[-3:]]
        self._live.update(Group(*parts), refresh=True)


@contextlib.contextmanager
def make_display(config: Config, console: Console | None = None) -> Iterator[Display]:
    """A board on a terminal, lines elsewhere, only notes when `observe.progress` is off."""
    console = console or Console(stderr=True)
    if not config.observe.progress:
        yield Quiet(console)
    elif not console.is_terminal:
        yield Lines(console, config.run.steps)
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield Board(console, config.run.steps, live)


def _evaluation_line(record: dict[str, Any]) -> str:
    greedy = f", greedy {record['greedy']:.1%}" if record["greedy"] is not None else ""
    suites = ", ".join(
        f"{suite} {r['success']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for suite, r in record["suites"].items()
    )
    return f"evaluation ({record['label']}): success {record['success']:.1%}{greedy}: {suites}"


def _blocked(reason: str, admission: str) -> str:
    return reason if admission == "nothing" else f"{reason}; admission: {admission}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _waits(record: dict[str, Any]) -> str:
    waits = {k.removeprefix("wait_"): v for k, v in record["seconds"].items() if k.startswith("wait_") and v > 0.005}
    return " ".join(f"{cause} {seconds:.1f} s" for cause, seconds in sorted(waits.items())) or "none"


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{cause} {n}" for cause, n in sorted(counts.items())) or "none"


def _spark(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[int((v - low) / span * (len(_BARS) - 1))] for v in values)
