"""`springtide quickstart`: the shipped model learns three suites at once, on two cores."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from springtide.cli.train import Json, Set, run
from springtide.config import load_config


def command(
    seed: Annotated[int, typer.Option(help="of tasks, tokens and everything else that is random")] = 0,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train springtide-nano on db, kg and household together; about ten minutes on two cores."""
    preset = Path(str(files("springtide.cli") / "quickstart.toml"))
    name = time.strftime("quickstart-%Y%m%d-%H%M%S")
    config = load_config(preset, (f"run.name={name}", f"run.seed={seed}", *(set_ or ())))
    run(config, as_json=json_)
