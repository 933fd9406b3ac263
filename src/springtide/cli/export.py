"""`springtide export RUN|CHECKPOINT DIR`: a plain Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from springtide.config import ConfigError


def command(
    source: Annotated[Path, typer.Argument(help="a run directory (its newest checkpoint) or a checkpoint")],
    target: Annotated[Path, typer.Argument(help="where to write; must not exist")],
) -> None:
    """Write a checkpoint's model as a directory that transformers (and vLLM) loads."""
    from springtide.rundir import RunDirectory
    from springtide.trainer.checkpoint import EXTRA, MANIFEST, OPTIMIZER, STATE, new_directory, verify

    directory = RunDirectory(source)
    saved = directory.saved()
    checkpoint = saved[0] if saved else source
    if not (checkpoint / MANIFEST).exists():
        raise ConfigError(f"{source} holds no checkpoint")
    if target.exists():
        raise ConfigError(f"{target} exists; name a new directory")
    verify(checkpoint)
    ours = {MANIFEST, OPTIMIZER, STATE, EXTRA}
    try:
        with new_directory(target) as scratch:
            for file in checkpoint.iterdir():
                if file.name not in ours:
                    shutil.copyfile(file, scratch / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    print(f"{checkpoint} -> {target}")
