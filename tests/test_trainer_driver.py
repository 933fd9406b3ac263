"""The driver's own decisions, apart from a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.config import Algorithm
from springtide.rollout.feeder import Versions
from springtide.rundir import RunDirectory
from springtide.trainer.driver import Driver
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


def test_when_a_frozen_rank_is_lost_the_call_to_the_other_is_given_up(tmp_path: Path) -> None:
    """It went on behind the run's end, and its own failure was seen by nobody."""
    busy = Busy()
    ranks = SimpleNamespace(reference=Lost(), proximal=busy)
    config = SimpleNamespace(algorithm=Algorithm(kl_coef=0.1))
    driver: Any = SimpleNamespace(
        config=config, _runtime=ranks, _versions=Versions(0), directory=RunDirectory(tmp_path)
    )

    async def run() -> None:
        with pytest.raises(ConnectionLost, match="reference went away"):
            await Driver._frozen_logprobs(driver, ())
        assert busy.cancelled

    asyncio.run(run())
