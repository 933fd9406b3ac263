"""`springtide view RUN [--live]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="a run directory: finished, under way, or killed")],
    live: Annotated[bool, typer.Option("--live", help="the page refreshes itself every few seconds")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0 for a free one")] = 5023,
) -> None:
    """Serve a run's report and episodes to a browser on this machine; Ctrl-C ends it."""
    from springtide.observe.view import open_viewer

    with open_viewer(run, port=port, live=live) as viewer:
        try:
            print(f"{viewer.url}  (Ctrl-C ends it)", flush=True)
            viewer.serve_forever()
        except KeyboardInterrupt:
            print()
