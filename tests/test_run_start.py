"""What cannot run is one line before any process starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.run_support import TESTS, run_config
from typer.testing import CliRunner

from springtide.cli.main import app
from springtide.config import ConfigError, SuiteEntry
from springtide.env.suite import SuiteError
from springtide.models.presets import ModelNotFound, check_weights, resolve_model
from springtide.trainer.start import check_run
from springtide.trainer.suites import name_suites


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refused(model: Path) -> str:
    """The one line with which a run of `model` is refused."""
    with pytest.raises(ModelNotFound) as caught:
        check_run(run_config(model, model.parent))
    text = str(caught.value)
    assert "\n" not in text and str(model) in text
    return text


def test_figures_that_could_not_be_written_are_refused_before_an_episode_is_played(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "springtide-nano", "--suite", "db", "--out", str(tmp_path / "no" / "f")])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"--out: there is no directory {tmp_path / 'no'}; ")


@pytest.mark.parametrize("key", ["engine", "trainer"])
def test_a_device_that_is_not_there_is_named_with_its_key(tiny_model: Path, tmp_path: Path, key: str) -> None:
    tables: dict[str, Any] = {key: {"device": "cuda:99"}}
    with pytest.raises(ConfigError, match=rf'^{key}\.device: .cuda:99. cannot be used here: .+; "cpu" always can$'):
        check_run(run_config(tiny_model, tmp_path, **tables))


def test_weights_that_are_missing_or_torn_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for damaged, says in (
        (whole[:-5], "is torn"),
        (whole[:300], "is torn; copy the model again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        (b"", "is not a safetensors file"),
    ):
        file.write_bytes(damaged)
        assert says in refused(model)
    file.unlink()
    assert "model.safetensors: No such file" in refused(model)
    file.mkdir()
    assert "Is a directory" in refused(model)


def test_weights_of_another_model_are_named_by_their_first_tensor(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    assert "self_attn.k_proj.weight is [16, 32] in the weights and [32, 32] by config.json" in refused(model)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "the weights lack model.layers.2.self_attn.q_proj.weight" in refused(model)
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "intermediate_size"}))
    assert "KeyError('intermediate_size')" in refused(model)


def test_weights_in_several_files_are_read_by_their_index(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({n: np.ascontiguousarray(tensors[n]) for n in held}, model / file)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: file for file, held in parts.items() for n in held}}))
    check_run(run_config(model, model.parent))
    (model / "b.safetensors").unlink()
    assert "b.safetensors: No such file" in refused(model)
    index.write_text("{}")
    assert "is not an index of weights" in refused(model)


def test_the_shipped_model_and_a_reference_by_name_are_checked(tiny_model: Path, tmp_path: Path) -> None:
    check_weights(resolve_model("springtide-nano"))
    check_run(run_config(tiny_model, tmp_path, reference={"path": "springtide-nano"}))
    with pytest.raises(ModelNotFound, match=r"^reference\.path: 'nowhere' is neither"):
        check_run(run_config(tiny_model, tmp_path, reference={"path": "nowhere"}))


AUTHORS = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS.parent)!r})
from tests.letters import Letters

class Sleeps(Letters):
    def tasks(split, level): time.sleep(1000)

class Exits(Letters):
    def tasks(split, level): os._exit(3)

class Raises(Letters):
    def tasks(split, level): raise LookupError("no such table")

class Unsized(Letters):
    def tasks(split, level): yield from ()
"""


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("Sleeps", r"tasks\('train', 'quick'\) did not return within 1 s; make a task when it is asked for"),
        ("Exits", r"tasks\('train', 'quick'\) ended its process with status 3; try `springtide doctor env .*:Exits`"),
        ("Raises", r"tasks\('train', 'quick'\) raised LookupError: no such table; try `springtide doctor env"),
        ("Unsized", r"tasks\('train', 'quick'\) raised TypeError: .* has no len\(\); try `springtide doctor env"),
    ],
)
def test_a_suite_whose_tasks_do_not_come_is_one_line_in_time(tmp_path: Path, suite: str, says: str) -> None:
    """A `tasks` that slept held the driver for ever, without a word."""
    (tmp_path / "authors.py").write_text(AUTHORS)
    use = f"{tmp_path / 'authors.py'}:{suite}"
    begun = time.monotonic()
    with pytest.raises(SuiteError, match=says) as caught:
        asyncio.run(name_suites([SuiteEntry(use=use, level="quick")], import_s=60.0, tasks_s=1.0))
    assert str(caught.value).startswith(f"suite {use}: ") and "\n" not in str(caught.value)
    assert time.monotonic() - begun < 20


def test_a_suite_whose_import_does_not_return_is_one_line_in_time(tmp_path: Path) -> None:
    (tmp_path / "author.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(SuiteError, match=r"author\.py:Any: its import did not return within 1 s; try `springtide doc"):
        asyncio.run(name_suites([SuiteEntry(use=f"{tmp_path / 'author.py'}:Any")], import_s=1.0))
