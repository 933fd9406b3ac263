"""Checkpoints continue bit for bit, are refused when a byte changed, and export to what transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from springtide.ledger import Ledger
from springtide.rundir import RunDirectory
from springtide.trainer import checkpoint as files
from springtide.trainer.checkpoint import CheckpointError
from springtide.trainer.rank import Rank
from springtide.trainer.start import newest_checkpoint
from trainer_parts import config, tiny_model, write_groups

SHAPES = [[[(20, 6)], [(12, 4)]], [[(30, 9), (8, 2)], [(9, 1)]]]


def open_rank(model: Path, optimizer: str = "adamw", checkpoint: Path | None = None, **options) -> Rank:
    rank = Rank()
    settings = config(trainer={"optimizer": optimizer, "lr": 1e-2, "warmup": 4}).model_dump(mode="json")
    rank.init(settings, str(model), str(checkpoint) if checkpoint else None, **options)
    return rank


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in rank._policy.tensors().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_trainer_continues_bit_for_bit(tmp_path, optimizer):
    model = tiny_model(tmp_path / "model")
    steps = [tuple(write_groups(tmp_path / "groups", SHAPES, seed=i)) for i in range(4)]
    straight = open_rank(model, optimizer)
    figures = [straight.train(items, version=0) for items in steps]

    first = open_rank(model, optimizer)
    for items in steps[:2]:
        first.train(items, version=0)
    first.save(str(tmp_path / "step-2"), {"cursor": [1, 2]})
    drawn = torch.rand(3)
    torch.manual_seed(99)

    second = Rank()
    settings = config(trainer={"optimizer": optimizer, "lr": 1e-2, "warmup": 4}).model_dump(mode="json")
    reply = second.init(settings, str(model), str(tmp_path / "step-2"))
    assert reply["extra"] == {"cursor": [1, 2]} and reply["steps"] == 2
    assert torch.equal(torch.rand(3), drawn), "the random state continues too"
    resumed = [second.train(items, version=0) for items in steps[2:]]
    assert_same(weights(straight), weights(second))
    for a, b in zip(figures[2:], resumed, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "extra.json", "config.json"])
def test_one_changed_byte_in_any_file_is_detected(tmp_path, name):
    model = tiny_model(tmp_path / "model")
    open_rank(model).save(str(tmp_path / "c"))
    files.verify(tmp_path / "c")
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is missing or not what was written; resume from the checkpoint"):
        open_rank(model, checkpoint=tmp_path / "c")


def test_a_torn_checkpoint_is_detected(tmp_path):
    rank = open_rank(tiny_model(tmp_path / "model"))
    rank.save(str(tmp_path / "c"))
    (tmp_path / "c" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing"):
        files.verify(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="torn"):
        files.read_state(tmp_path / "c")


def test_every_flipped_byte_of_the_manifest_and_every_cut_of_it_is_detected(tmp_path):
    """What lists the others' sums has none of its own: whatever it says then, it must not be believed."""
    open_rank(tiny_model(tmp_path / "model")).save(str(tmp_path / "c"))
    path = tmp_path / "c" / "manifest.json"
    whole = path.read_bytes()
    names = ("state.json", "extra.json", "optimizer.pt", "moments.safetensors")
    small = {name: (tmp_path / "c" / name) for name in names}
    entries = json.loads(whole)
    path.write_text(json.dumps({name: entries[name] for name in small}))  # few files: thousands of readings
    data = path.read_bytes()
    files.verify(tmp_path / "c")
    for at in range(len(data)):
        for bit in (1, 16, 64):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            if _same_json(path.read_bytes(), data):
                continue  # white space
            with pytest.raises(CheckpointError) as raised:
                files.verify(tmp_path / "c")
            assert "\n" not in str(raised.value)
    for text in (whole[: len(whole) // 2], b"", b"{}", b"[]", b"7", b"\xff\xfe", b'{"state.json": 3}'):
        path.write_bytes(text)
        with pytest.raises(CheckpointError):
            files.verify(tmp_path / "c")


DAMAGE = {
    "truncated": lambda c: os.truncate(c / "model.safetensors", (c / "model.safetensors").stat().st_size - 1),
    "a flipped byte": lambda c: _flip(c / "optimizer.pt"),
    "a missing file": lambda c: (c / "extra.json").unlink(),
    "an emptied manifest": lambda c: (c / "manifest.json").write_text("{}"),
    "emptied": lambda c: shutil.rmtree(c) or c.mkdir(),
}


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used_with_a_line_and_the_damaged_one_never_comes_back(tmp_path, how):
    rank = open_rank(tiny_model(tmp_path / "model"))
    directory = RunDirectory(tmp_path / "run")
    for step in (10, 20, 30):
        rank.save(str(directory.checkpoint(step)), {"step": step, "incarnation": 0})
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(0)
    notes = []
    assert newest_checkpoint(directory, ledger, notes.append) == directory.checkpoint(30)
    assert notes == []
    shutil.copytree(directory.checkpoint(30), tmp_path / "whole")
    DAMAGE[how](directory.checkpoint(30))
    assert newest_checkpoint(directory, ledger, notes.append) == directory.checkpoint(20)
    (line,) = notes
    assert str(directory.checkpoint(30)) in line and "\n" not in line
    assert directory.saved() == [directory.checkpoint(20), directory.checkpoint(10)]
    assert directory.checkpoint(30).with_name("step-000030.unused").is_dir()
    # The run went on from 20: were the disk whole again, what 30 had learned must not count beside what came since.
    ledger.begin(20)
    shutil.move(tmp_path / "whole", directory.checkpoint(30))
    assert newest_checkpoint(directory, ledger, notes.append) == directory.checkpoint(20)
    assert "left behind when the run went on from an earlier checkpoint" in notes[1]
    rank.save(str(directory.checkpoint(30)), {"step": 30, "incarnation": 1})
    assert newest_checkpoint(directory, ledger, notes.append) == directory.checkpoint(30)
    assert len(notes) == 2


def test_a_run_without_a_whole_checkpoint_is_refused_and_nothing_is_set_aside(tmp_path):
    rank = open_rank(tiny_model(tmp_path / "model"))
    directory = RunDirectory(tmp_path / "run")
    for step in (10, 20):
        rank.save(str(directory.checkpoint(step)), {"step": step, "incarnation": 0})
        _flip(directory.checkpoint(step) / "model.safetensors")
    for _ in range(2):  # nor does asking again begin the run anew
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged; start a new run"):
            newest_checkpoint(directory, Ledger(tmp_path / "ledger.sqlite"), lambda text: None)
    assert len(directory.saved()) == 2


def _same_json(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_scratch(tmp_path):
    rank = open_rank(tiny_model(tmp_path / "model"))
    rank.save(str(tmp_path / "c"), {"step": 1})
    with pytest.raises(TypeError):
        rank.save(str(tmp_path / "c"), {"step": object()})  # fails half way, after the weights were written
    assert files.read_state(tmp_path / "c")[1] == {"step": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "model"]
    rank.save(str(tmp_path / "c"), {"step": 2})
    assert files.read_state(tmp_path / "c")[1] == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "model"]


def test_another_optimiser_is_refused_on_resume(tmp_path):
    model = tiny_model(tmp_path / "model")
    open_rank(model, "adamw").save(str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="'muon'"):
        open_rank(model, "muon", checkpoint=tmp_path / "c")


def test_an_export_loads_in_transformers_with_equal_log_probs(tmp_path):
    rank = open_rank(tiny_model(tmp_path / "model"))
    rank.train(tuple(write_groups(tmp_path / "groups", SHAPES)), version=0)
    rank.export(str(tmp_path / "out"))
    ids = np.arange(1, 40, dtype=np.int32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    with torch.no_grad():
        rows = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(input_ids=rows).logits[0, :-1]
    want = torch.log_softmax(logits, -1).gather(1, rows[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(rank._policy.score(ids), want, atol=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()


def test_a_reference_pulls_any_published_version(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    trainer = open_rank(model, store=str(tmp_path / "store"))
    trainer.publish(0)
    trainer.train(items, version=0)
    trainer.publish(1)
    reference = open_rank(model, store=str(tmp_path / "store"), role="reference")
    for version in (1, 0):
        assert reference.pull(version) == {"version": version}
        same = torch.equal(weights(reference)["model.norm.weight"], weights(trainer)["model.norm.weight"])
        assert same == (version == 1)
    with pytest.raises(ValueError, match="reference"):
        reference.train(items, version=0)
