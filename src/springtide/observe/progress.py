"""What a person watches while a run trains: one table that is redrawn, or plain lines where there is no terminal.

Owns: the terminal. Invariants: its figures are records that are also in `metrics.jsonl`; what goes on before the first
step is said too, so that it is never blank; without a terminal every step is one line, so that a log reads well.
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
from springtide.observe.plots import label_of

_BARS = "▁▂▃▄▅▆▇█"
_REDRAW_S, _SAY_S = 0.5, 10.0  # what is waited for: redrawn at most, said in a line at most, this often
_COUNT_S = 5.0  # the same of how far a part of the run has come
_RECENT = 48  # steps of the sparkline


class Quiet:
    """Shows nothing but notes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def waiting(self, reason: str, admission: str) -> None: ...

    def doing(self, what: str, done: int = 0, total: int = 0) -> None: ...

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


class Lines(Quiet):
    """One line a step, an evaluation, and a part of the run that is not yet or no longer a step."""

    def __init__(self, console: Console, config: Config) -> None:
        super().__init__(console)
        self._config, self._what, self._said = config, "", 0.0
        self._say(f"run directory: {config.run_dir}")
        self.doing("starting processes")

    def waiting(self, reason: str, admission: str) -> None:
        if time.monotonic() - self._said > _SAY_S:
            self._say(f"waiting for: {_blocked(reason, admission)}")

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        if what != self._what or time.monotonic() - self._said > _COUNT_S:
            self._what = what
            self._say(_counted(what, done, total))

    def step(self, record: dict[str, Any]) -> None:
        suites = " ".join(f"{k} {v:.0%}" for k, v in record["success"].items() if k != "mean")
        step, minutes = _progress(record, self._config)
        self._say(
            f"step {step}  {minutes}  success {_share(record['success']['mean'])} ({suites})  "
            f"{record['goodput_tokens_per_s']:.0f} tok/s  staleness {record['staleness']['mean']:.1f}  "
            f"wait {_waits(record)}"
        )

    def evaluation(self, record: dict[str, Any]) -> None:
        self._say(_evaluation_line(record, self._config))

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Board(Quiet):
    """A live table."""

    def __init__(self, console: Console, config: Config, live: Live) -> None:
        super().__init__(console)
        self._config, self._live = config, live
        self._history: list[float] = []
        self._evaluations: list[str] = []
        self._notes: list[str] = []
        self._record: dict[str, Any] | None = None
        self._waiting, self._what, self._doing = "", "", ""
        self._drawn = 0.0
        self.doing("starting processes")

    def step(self, record: dict[str, Any]) -> None:
        self._record, self._doing = record, ""
        if record["success"]["mean"] is not None:  # None where no episode ended since the last step
            self._history.append(record["success"]["mean"])
        self._draw()

    def evaluation(self, record: dict[str, Any]) -> None:
        self._evaluations.append(_evaluation_line(record, self._config))
        self._doing = ""
        self._draw()

    def waiting(self, reason: str, admission: str) -> None:
        self._waiting = _blocked(reason, admission)
        if time.monotonic() - self._drawn > _REDRAW_S:
            self._draw()

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        began, self._what, self._doing = what != self._what, what, _counted(what, done, total)
        if began or time.monotonic() - self._drawn > _REDRAW_S:
            self._draw()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        parts: list[Any] = [Text(f"run directory: {self._config.run_dir}", style="dim")]
        parts += [Text(line) for line in self._evaluations]
        record = self._record
        if record is not None:
            table = Table.grid(padding=(0, 2))
            step, minutes = _progress(record, self._config)
            table.add_row("step", step, "time", minutes)
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
        if self._doing:
            parts.append(Text(f"now: {self._doing}"))
        if self._waiting:
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
        yield Lines(console, config)
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield Board(console, config, live)


def _progress(record: dict[str, Any], config: Config) -> tuple[str, str]:
    """Steps and minutes so far, each against its total where that is what ends the run."""
    minutes = f"{record['t'] / 60:.1f}"
    if config.run.minutes is None:
        return f"{record['step']}/{config.run.steps}", f"{minutes} min"
    return f"{record['step']}", f"{minutes} of {config.run.minutes:.1f} min"


def _counted(what: str, done: int, total: int) -> str:
    return f"{what} {done} of {total}" if total else what


def _evaluation_line(record: dict[str, Any], config: Config) -> str:
    greedy = f", greedy {record['greedy']:.1%}" if record["greedy"] is not None else ""
    suites = ", ".join(
        f"{suite} {r['success']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for suite, r in record["suites"].items()
    )
    label = label_of(record["label"], config.trainer.cold_start.steps)
    return f"evaluation ({label}): success {record['success']:.1%}{greedy}: {suites}"


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
