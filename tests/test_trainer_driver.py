"""What the driver does with the frozen ranks, apart from a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.config import Algorithm
from springtide.rundir import RunDirectory
from springtide.trainer.frozen import Frozen
from springtide.wire import ConnectionLost


class Lost:
    """A rank that died, and does not come up again."""

    async def call_again(self, method: str, **payload: Any) -> None:
        await asyncio.sleep(0.01)
        raise ConnectionLost(f"reference went away ({method})")


class Busy:
    cancelled = False

    async def call_again(self, method: str, **payload: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    call = call_again


def test_when_a_frozen_rank_is_lost_the_call_to_the_other_is_given_up(tmp_path: Path) -> None:
    """It went on behind the run's end, and its own failure was seen by nobody."""
    busy = Busy()
    training = Busy()
    ranks: Any = SimpleNamespace(reference=Lost(), proximal=busy, trainer=training, weights=tmp_path)
    config: Any = SimpleNamespace(algorithm=Algorithm(kl_coef=0.1))
    frozen = Frozen(config, ranks, RunDirectory(tmp_path))

    async def run() -> None:
        with pytest.raises(ConnectionLost, match="reference went away"):
            await frozen.train((), 0, 1e-3, 1)
        assert busy.cancelled and training.cancelled

    asyncio.run(run())
