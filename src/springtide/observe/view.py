"""The pages of a run over HTTP on this machine: the report, and every episode that was kept.

Owns: one listening socket on 127.0.0.1. Invariants: it reads the run directory and nothing else (a page's file must be
one of the names listed in `trajectories/`, so no path is ever built from a request); every page is made afresh, but
events are read once, as they come; a damaged file is a page that says so. The driver serves nothing and does not know
of this.
Called by: `springtide view`.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from springtide.config import ConfigError
from springtide.ledger import VisitRow
from springtide.observe import transcripts
from springtide.observe.eventlog import EventLog
from springtide.observe.markup import Html, join, page, tag
from springtide.observe.report import render
from springtide.observe.runview import RunView
from springtide.rundir import RunDirectory
from springtide.trace import atomic_write

LIVE_S = 4.0  # seconds between refreshes: a step of the quickstart takes about as long
_PAGE = 200  # rows of a list


class Viewer(ThreadingHTTPServer):
    """Serves the run at `run`. Bound when made; `url` says where."""

    daemon_threads = True

    def __init__(self, run: Path, port: int, live_s: float = 0.0) -> None:
        self.run, self.live_s = run, live_s
        self.events = EventLog(RunDirectory(run).events)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextlib.contextmanager
def open_viewer(run: Path, *, port: int = 5023, live: bool = False) -> Iterator[Viewer]:
    """A viewer of the run directory `run`; call `serve_forever`. port 0: a free one, also written to RUN/ports.json.

    Raises: ConfigError when there is no run, or the port cannot be had.
    """
    RunView.open(run)
    try:
        viewer = Viewer(run, port, LIVE_S if live else 0.0)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"port {port} {why}; choose another with --port, or any free one with --port 0") from None
    with viewer:
        if port == 0:
            _announce(run / "ports.json", viewer.port)
        yield viewer


class _Handler(BaseHTTPRequestHandler):
    server: Viewer

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            return self._send(HTTPStatus.BAD_REQUEST, _message(f"That is no address: {error}."))
        try:
            if url.path == "/":
                body = render(
                    RunView.open(self.server.run), live_s=self.server.live_s, served=True, events=self.server.events
                )
            elif url.path == "/groups":
                body = _list(self.server.run, parse_qs(url.query), self.server.live_s)
            elif url.path.startswith("/groups/"):
                found = _group(self.server.run, unquote(url.path.removeprefix("/groups/")))
                if found is None:
                    return self._send(HTTPStatus.NOT_FOUND, _message("There is no such episode in this run."))
                body = found
            else:
                return self._send(HTTPStatus.NOT_FOUND, _message("There is no such page."))
        except ConfigError as error:  # the run directory went away
            return self._send(HTTPStatus.GONE, _message(str(error)))
        except Exception as error:  # said to the reader: a dropped connection would say nothing
            text = f"This page cannot be made: {type(error).__name__}: {error}"
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, _message(text))
        self._send(HTTPStatus.OK, body)

    def _send(self, status: HTTPStatus, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader left
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line."""


def _list(run_dir: Path, query: dict[str, list[str]], live_s: float) -> str:
    """Every kept episode: evaluations, gold, and groups with what the ledger says of them; newest first."""
    run = RunView.open(run_dir)
    names = [p.name for p in run.trajectories("*.msgpack")]
    rows = {row.path: row for row in ([] if isinstance(run.ledger, str) else run.ledger[1])}
    groups = sorted((n for n in names if n[0].isdigit()), reverse=True)
    ordered = [n for n in names if n.startswith("eval-")] + groups + [n for n in names if n.startswith("gold-")]
    start = max(0, int(query["from"][0])) if query.get("from", [""])[0].isdecimal() else 0
    shown = ordered[start : start + _PAGE]
    table = tag("table", tag("tr", [tag("th", h) for h in ("file", "task", "step", "rewards")]),
                [_row(name, rows.get(name)) for name in shown])  # fmt: skip
    turn = [
        tag("a", text, href=f"/groups?from={at}")
        for text, at in (("← before", start - _PAGE), ("after →", start + _PAGE))
        if 0 <= at < len(ordered) or (at < 0 < start)
    ]
    count = f"{len(ordered):,} files; {start + 1 if shown else 0} to {start + len(shown)} shown"
    body = [tag("h1", "Episodes"), tag("p", count, class_="lead"), tag("div", table, class_="card scroll"),
            tag("div", turn, class_="line")]  # fmt: skip
    return page(f"{run.path.name}: episodes", body, [("/", "← Report")], live_s=live_s)


def _row(name: str, row: VisitRow | None) -> Html:
    link = tag("a", name.removesuffix(".msgpack"), href=f"/groups/{quote(name)}")
    if row is None or row.summary is None:
        return tag("tr", tag("td", link), tag("td"), tag("td"), tag("td"))
    rewards = ", ".join("–" if m[2] is None else f"{m[2]:.3g}" for m in row.summary["members"])
    return tag("tr", tag("td", link), tag("td", row.task.id), tag("td", row.step), tag("td", rewards))


def _group(run_dir: Path, name: str) -> str | None:
    """The page of one file; None unless `name` is one that the directory lists."""
    path = {p.name: p for p in RunView.open(run_dir).trajectories("*.msgpack")}.get(name)
    if path is None:
        return None
    group = RunView.group(path)
    if isinstance(group, str):
        return _message(group)
    title = join([tag("b", group.task.id), f", visit {group.visit}"])
    if len(group.trajectories) == 1:
        body: Any = tag("div", transcripts.transcript(group.trajectories[0]), class_="card")
    else:
        body = transcripts.group(group, title=title, key="group", open_=True)
    return page(name, [tag("h1", group.task.id), body], [("/", "← Report"), ("/groups", "← All episodes")])


def _message(text: str) -> str:
    return page("springtide", tag("p", text, class_="callout"), [("/", "← Report")])


def _announce(path: Path, port: int) -> None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or torn: it holds nothing but the ports of servers that run now
        found = None
    ports = found if isinstance(found, dict) else {}
    try:
        atomic_write(path, (json.dumps({**ports, "view": port}) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; name a port, as --port 5023") from None
