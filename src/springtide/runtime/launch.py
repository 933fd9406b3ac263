"""Where a run's processes live: on this machine, or on the nodes of a Ray cluster. Nothing else asks for the kind.

Owns: the choice by `runtime.kind`, and what every kind offers (`Places`). Invariant: all else in the runtime is one
code for both: processes are started by `Places.launch`, and found by path below `Places.directory`.
Called by: `runtime.local`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from springtide.config import Config
from springtide.process import Launcher, scratch_directory, start_process


@dataclass(frozen=True, slots=True)
class Places:
    """launch: starts a process of the run, called by one of the seats' names. directory: of their addresses; whoever
    can read it may call them. weights: where published weights are seen by all of them; None: anywhere here."""

    launch: Launcher
    directory: Path
    weights: Path | None = None


@contextlib.asynccontextmanager
async def open_places(config: Config, run: Path, seats: Mapping[str, str]) -> AsyncIterator[Places]:
    """Room for every process of the run: seats name each, and its kind (a role, or `worker`, or `env`).

    Raises: ConfigError, ProcessFailed.
    """
    if config.runtime.kind == "ray":
        from springtide.runtime.ray import open_ray  # only who asks for it needs it installed

        async with open_ray(config, run, seats) as places:
            yield places
        return
    with scratch_directory() as directory:
        yield Places(start_process, directory)
