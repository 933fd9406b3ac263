"""`springtide export RUN|CHECKPOINT DIR [--adapter] [--base MODEL]`: a plain Hugging Face directory, or an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from springtide.config import ConfigError


def command(
    source: Annotated[Path, typer.Argument(help="a run directory (its newest checkpoint) or a checkpoint")],
    target: Annotated[Path, typer.Argument(help="where to write; must not exist")],
    adapter: Annotated[bool, typer.Option("--adapter", help="of LoRA: the adapter alone, as peft reads it")] = False,
    base: Annotated[str | None, typer.Option(help="of LoRA: where the base model lies now, if it was moved")] = None,
) -> None:
    """Write a checkpoint's model as a directory that transformers (and vLLM) loads. What LoRA trained is merged."""
    from safetensors import SafetensorError

    from springtide.models.presets import resolve_model
    from springtide.rundir import RunDirectory
    from springtide.trainer.checkpoint import ADAPTER, EXTRA, MANIFEST, MOMENTS, OPTIMIZER, STATE, new_directory, verify

    directory = RunDirectory(source)
    saved = directory.saved()
    checkpoint = saved[0] if saved else source
    if not (checkpoint / MANIFEST).exists():
        raise ConfigError(f"{source} holds no checkpoint")
    if target.exists():
        raise ConfigError(f"{target} exists; name a new directory")
    verify(checkpoint)
    lora = (checkpoint / ADAPTER).exists()
    if not lora and (adapter or base):
        raise ConfigError(f"{checkpoint} holds whole weights; --adapter and --base are for runs with trainer.lora.rank")
    ours = {MANIFEST, MOMENTS, OPTIMIZER, STATE, EXTRA}
    try:
        if lora and not adapter:
            from springtide.trainer.model import ModelError
            from springtide.trainer.rank import export_merged

            try:
                export_merged(checkpoint, target, resolve_model(base, key="--base") if base else None)
            except ModelError as error:
                raise ConfigError(f"the base model cannot be read: {error}; --base says where it lies now") from None
            print(f"{checkpoint} -> {target}")
            return
        with new_directory(target) as scratch:
            for file in checkpoint.iterdir():
                if file.name not in ours:
                    shutil.copyfile(file, scratch / file.name)
    except (OSError, SafetensorError) as error:  # the second is how safetensors says that a disk is full
        raise ConfigError(f"cannot write {target}: {error}") from None
    print(f"{checkpoint} -> {target}")
