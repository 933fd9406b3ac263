"""The command line: one typer application, one file a command.

Owns: how faults reach the person who typed. Invariants: bad input is one line on stderr and exit 2; a run that cannot
go on is one line and exit 1; Ctrl-C leaves no process behind (exit 130).
"""

from __future__ import annotations

import errno
import sqlite3
import sys
from typing import Annotated

import typer

import springtide
from springtide.cli import advise, compare, doctor, evaluate, export, quickstart, simulate, train, view
from springtide.config import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Online reinforcement learning for agents.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"springtide {springtide.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and stop")
    ] = False,
) -> None: ...


app.command("quickstart")(quickstart.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("compare")(compare.command)
app.command("view")(view.command)
app.command("export")(export.command)
app.command("simulate")(simulate.command)
app.command("advise")(advise.command)
app.add_typer(doctor.app, name="doctor", help="Check an environment, a model or a configuration before you rely on it.")


def main() -> None:
    try:
        app()
    except Exception as error:
        bad_input, broken = _kinds()
        if isinstance(error, bad_input):
            print(f"springtide: {error}", file=sys.stderr)
            sys.exit(2)
        if isinstance(error, broken):
            print(f"springtide: {error}", file=sys.stderr)
            sys.exit(1)
        if (said := _of_files(error)) is not None:
            print(f"springtide: {said}", file=sys.stderr)
            sys.exit(1)
        raise


def _of_files(error: Exception) -> str | None:
    """What the driver's own files (ledger, events, metrics) met, in one line; None for another kind of fault."""
    full = f"cannot write the run's files: {error}; make room and continue with --resume"
    if isinstance(error, OSError):
        return full if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None
    if not isinstance(error, sqlite3.OperationalError):
        return None
    name = getattr(error, "sqlite_errorname", "")  # absent where Python itself raised it
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):  # a quota and a limit on files read as failed writes
        return full
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"the run's ledger: {error}; end the program that holds ledger.sqlite, and continue with --resume"
    return f"the run's ledger: {error}; mend that and continue with --resume"


def _kinds() -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """The exceptions that are the user's to mend, and those that end a run; imported only when one is there."""
    from springtide.chat.template import ChatError
    from springtide.engine.openai import EndpointError
    from springtide.env.session import EnvironmentUnavailable
    from springtide.env.suite import SuiteError
    from springtide.ledger import LedgerError
    from springtide.models.presets import ModelNotFound
    from springtide.process import ProcessFailed
    from springtide.rollout.feeder import BrokenRun
    from springtide.trainer.checkpoint import CheckpointError
    from springtide.wire import ConnectionLost, DeadlineExceeded, RemoteError

    wire = (ConnectionLost, DeadlineExceeded, RemoteError)
    return (
        (ConfigError, SuiteError, ChatError, ModelNotFound, LedgerError, CheckpointError),
        (BrokenRun, EndpointError, ProcessFailed, EnvironmentUnavailable, *wire),
    )


if __name__ == "__main__":
    main()
