"""The local runtime before its processes: what it needs and says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide.config import ConfigError, make_config
from springtide.runtime.local import open_runtime, weights_directory


def test_a_weights_directory_that_cannot_be_written_is_one_line_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    run = tmp_path / "run"

    async def start(configured: Path) -> None:
        config = make_config({"suites": [{"use": "db"}], "weights": {"dir": str(configured)}})
        async with open_runtime(config, run, tmp_path, checkpoint=None):
            raise AssertionError("it must not start")

    for configured in (tmp_path / "a file", tmp_path / "a file" / "below"):
        with pytest.raises(
            ConfigError, match=r"weights\.dir: cannot write .*a file.*Not a directory.*name a dir"
        ) as raised:
            asyncio.run(start(configured))
        assert "\n" not in str(raised.value)
    left = weights_directory(run, tmp_path)
    left.write_text("no directory either")
    with pytest.raises(ConfigError, match=r"weights\.dir: cannot write"):
        asyncio.run(start(tmp_path))
    assert not run.exists(), "no process had a log to write"
