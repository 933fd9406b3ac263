"""What the trainer's tests share: a tiny random Qwen3 directory, groups of trajectories on disk, a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from springtide.config import Config, make_config
from springtide.trace import Group, Outcome, Segment, TaskRef, Trajectory

VOCAB = 64
torch.set_num_threads(1)  # as in every process of a run; threads that share busy cores wait for each other
logging.disable_progress_bar()


def tiny_model(directory: Path, seed: int = 0, vocab: int = VOCAB, tokens: int | None = None, hidden: int = 32) -> Path:
    """A random two-layer Qwen3 with a tokenizer.json of `tokens` ids (default: as many as the model has)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        # Large enough that random logits differ clearly: a wrong mask or position then shows in any comparison.
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    pieces = {f"t{i}": i for i in range(tokens if tokens is not None else vocab)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}, "added_tokens": []}))
    return directory


def segment(rng: np.random.Generator, length: int, actions: int, version: int = 0) -> Segment:
    """Random ids with `actions` sampled tokens at random places after the first."""
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    mask = np.zeros(length, dtype=bool)
    mask[rng.choice(np.arange(1, length), actions, replace=False)] = True
    logprobs = np.where(mask, -rng.random(length) - 3.0, 0.0).astype(np.float32)
    return Segment(ids, mask, logprobs, np.where(mask, version, -1).astype(np.int64))


def trajectory(
    segments: Sequence[Segment], task: TaskRef, member: int, visit: int = 0, reward: float | None = 1.0
) -> Trajectory:
    outcome = Outcome("completed", reward, None if reward is None else reward > 0)
    return Trajectory(task, visit, member, 0, tuple(segments), (), (), outcome)


def task(index: int, suite: str = "s") -> TaskRef:
    return TaskRef(f"{suite}/quick/train/{index}", suite, "1", "train", "quick", index, index)


def write_groups(directory: Path, shapes: Sequence[Sequence[Sequence[tuple[int, int]]]], seed: int = 0) -> list[dict]:
    """One file a group; shapes[group][member] lists (length, actions) of its segments. Returns train items."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    items = []
    for g, members in enumerate(shapes):
        ref = task(g)
        path = directory / f"{seed}-{g}.msgpack"
        made = [trajectory([segment(rng, *s) for s in segments], ref, m, g) for m, segments in enumerate(members)]
        Group(ref, g, tuple(made)).save(path)
        items += [{"path": str(path), "member": m, "advantage": float(rng.normal())} for m in range(len(members))]
    return items


def config(**tables: dict[str, Any]) -> Config:
    return make_config({"suites": [{"use": "db"}], "trainer": {"lr": 1e-2}, **tables})
