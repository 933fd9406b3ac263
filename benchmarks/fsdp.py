"""Trained tokens a second of two trainer ranks against one, by `trainer.sharding`, on free cores.

Both arms are real trainer processes and take the same optimiser steps: groups of eight random segments that share their
first tokens, as a group's members share their task. nano: springtide-nano's shapes. larger: a random model about
sixteen times its size. The arms take turns, step by step, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from common import Json, Load, Row, arguments, emit, ratio_interval, report, scratch

REQUIRED = 1.6
SHARDINGS = ("replicate", "fsdp")
_CALL_S = 600.0
# Hidden size, feed-forward size, layers, heads, KV heads, vocabulary; groups of a step; measured steps an arm.
MODELS = {"nano": (128, 320, 5, 4, 2, 1536, 24, 8), "larger": (448, 1216, 6, 8, 4, 8192, 12, 4)}
_TOKENS, _SHARED, _ACTIONS = 240, 120, 80  # of a segment: all, those its group shares, those that are trained


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    with Load() as load, scratch() as directory:
        rows = [row for name in MODELS for row in asyncio.run(_compare(name, directory / name, quick=args.quick))]
    emit(report("fsdp", rows, load, quick=args.quick), as_json=args.json)


async def _compare(name: str, directory: Path, *, quick: bool) -> list[Row]:
    *_, groups, steps = MODELS[name]
    groups, steps = (groups // 4, 2) if quick else (groups, steps)
    _build(name, directory / "model")
    items = _write_groups(directory, groups, MODELS[name][5])
    arms = {"one rank": (1, "replicate"), **{sharding: (2, sharding) for sharding in SHARDINGS}}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    figures: dict[str, Json] = {}
    async with contextlib.AsyncExitStack() as stack:
        worlds = {
            arm: await stack.enter_async_context(_world(directory / arm, directory / "model", *shape))
            for arm, shape in arms.items()
        }
        for step in range(steps + 1):
            for arm, world in worlds.items():
                learned = await world.call("train", deadline_s=_CALL_S, items=items, version=step)
                if step:  # the first also takes memory from the system
                    speeds[arm].append(learned["tokens"] / learned["seconds"]["total_s"])
                    figures[arm] = learned
    base = speeds.pop("one rank")
    rows = []
    for arm, found in speeds.items():
        low, high = ratio_interval(found, base)
        seconds = figures[arm]["seconds"]
        rows.append(
            Row(
                f"{name}: two ranks, {arm}",
                statistics.fmean(found),
                "tokens/s",
                "one rank",
                statistics.fmean(base),
                required=REQUIRED,
                judged="ratio",
                ci_low=low,
                ci_high=high,
                seeds=1,
                extra={
                    "steps": steps,
                    "same_loss": abs(figures[arm]["loss"] - figures["one rank"]["loss"]) < 1e-4,
                    "computed_tokens": figures[arm]["computed_tokens"],
                    "computed_tokens_one_rank": figures["one rank"]["computed_tokens"],
                    "wait_s": seconds["wait_s"],
                    "reduce_s": seconds["reduce_s"],
                    "step_s": seconds["total_s"],
                },
            )
        )
    return rows


@contextlib.asynccontextmanager
async def _world(logs: Path, model: Path, size: int, sharding: str) -> AsyncIterator[Any]:
    from springtide.config import make_config
    from springtide.runtime.ranks import Rank, keep_alive
    from springtide.runtime.world import World

    tree = make_config({"suites": [{"use": "db"}], "trainer": {"sharding": sharding, "ranks": size}})
    init = {"config": tree.model_dump(mode="json"), "model": str(model)}
    with tempfile.TemporaryDirectory() as sockets:
        ranks = [
            Rank(
                f"trainer-{i}",
                "springtide.trainer.rank:main",
                {**init, "world": {"rank": i, "size": size, "meet": f"file://{sockets}/meet"} if size > 1 else None},
                log_dir=logs,
                socket_path=f"{sockets}/{i}",
                start_s=_CALL_S,
                restart=False,
                silent_s=60.0,
            )
            for i in range(size)
        ]
        async with keep_alive(ranks):
            yield World(ranks)


def _build(name: str, directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    hidden, inner, layers, heads, kv_heads, vocab, _, _ = MODELS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def _write_groups(directory: Path, count: int, vocab: int) -> tuple[Json, ...]:
    import numpy as np

    from springtide.trace import Group, Outcome, Segment, TaskRef, Trajectory

    rng, items = np.random.default_rng(0), []
    for g in range(count):
        ref = TaskRef(f"s/quick/train/{g}", "s", "1", "train", "quick", g, g)
        start, made = rng.integers(0, vocab, _SHARED), []
        for member in range(8):
            length = _TOKENS + int(rng.integers(-60, 61))  # sequences are uneven
            ids = np.concatenate([start, rng.integers(0, vocab, length - _SHARED)]).astype(np.int32)
            mask = np.arange(length) >= length - _ACTIONS
            logprobs = np.where(mask, -np.log(vocab), 0).astype(np.float32)
            segment = Segment(ids, mask, logprobs, np.where(mask, 0, -1).astype(np.int64))
            made.append(Trajectory(ref, g, member, 0, (segment,), (), (), Outcome("completed", 1.0, True)))
        path = directory / f"{g}.msgpack"
        Group(ref, g, tuple(made)).save(path)
        items += [{"path": str(path), "member": m, "advantage": float(rng.normal())} for m in range(8)]
    return tuple(items)


if __name__ == "__main__":
    main()
