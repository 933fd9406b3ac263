"""A short learning run on the real parts in one process: engine, weight store, group files, advantages, trainer ranks.

Say letters: of a reply's `NEW` tokens, the share that are one letter. Two suites, of which the second pays ten times as
much. What is trained was sampled `LAG` updates before, as in an asynchronous run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from tests.conftest import make_tiny_model
from tests.trainer_parts import task, trajectory

from springtide.algorithms.advantages import GroupRewards, Member, RunningMoments, advantages, consumed
from springtide.config import Config, make_config
from springtide.engine.local.engine import EngineSettings, LocalEngine
from springtide.engine.protocol import Sampling
from springtide.trace import Group, Segment
from springtide.trainer.rank import Rank

GROUPS, MEMBERS, NEW, LAG = 6, 8, 6, 2
SCALE = {"ones": 1.0, "tens": 10.0}


def speaking_model(directory: Path) -> Path:
    """A tiny random model with large matrices: its layers matter, and its head, were it frozen, can say something."""
    make_tiny_model(directory, hidden=64)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    scale = {n: 10.0 if "embed" in n else 5.0 if t.ndim == 2 else 1.0 for n, t in tensors.items()}
    save_file({name: t * scale[name] for name, t in tensors.items()}, file, {"format": "pt"})
    return directory


def letters(model: Path) -> set[int]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {i for piece, i in vocabulary.items() if piece.isascii() and piece.isalpha()}


def learn(directory: Path, model: Path, steps: int, **tables: Any) -> tuple[list[float], list[dict[str, Any]]]:
    """The mean share of letters in what was sampled at each step, and the trainer's figures."""
    return asyncio.run(_learn(make_config({"suites": [{"use": "db"}], **tables}), directory, model, steps))


async def _learn(config: Config, directory: Path, model: Path, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    store, algorithm, lora = directory / "store", config.algorithm, config.trainer.lora.rank > 0
    store.mkdir()
    tree = config.model_dump(mode="json")

    def rank(role: Any) -> Rank:
        made = Rank()
        made.init(tree, str(model), store=str(store), role=role)
        return made

    trainer, proximal = rank("trainer"), rank("reference") if algorithm.old_logprobs == "recompute" else None
    reference = (trainer if lora else rank("reference")) if algorithm.kl_coef > 0 else None
    running, shares, figures = RunningMoments({}), [], []
    async with LocalEngine.open(EngineSettings(str(model), str(store), kv_tokens=8192)) as engine:
        for step in range(steps):
            trainer.publish(step)
            await engine.load(step)
            groups = [group async for group in _play(engine, letters(model), step)]
            shares.append(fmean(t.outcome.reward / SCALE[g.task.suite] for g in groups for t in g.trajectories))
            groups = [g for g in groups if advantages([GroupRewards.of(g)], algorithm)[0].dropped is None]
            if not groups:
                break  # it always succeeds
            for group in groups:
                group.save(directory / f"{group.visit}")
            items = [
                {"path": str(directory / f"{g.visit}"), "member": t.member} for g in groups for t in g.trajectories
            ]
            rewards = [GroupRewards.of(g) for g in groups]
            if reference is not None and algorithm.kl_in == "reward":
                told = {(v, m): algorithm.kl_coef * kl for v, m, kl in reference.kl(tuple(items))["kl"]}
                rewards = [_less(r, told) for r in rewards]
            results = advantages(rewards, algorithm, running)
            given = {(r.visit, m): a for r in results for m, a in r.values.items()}
            taken = tuple(
                {**item, "advantage": given[key]}
                for item in items
                if (key := (int(Path(item["path"]).name), item["member"])) in given
            )
            files = {}
            if reference is not None and algorithm.kl_in == "loss":
                files["ref_logprobs"] = str(directory / "ref")
                reference.logprobs(taken, files["ref_logprobs"], reference=True)
            if proximal is not None:
                files["old_logprobs"] = str(directory / "old")
                proximal.logprobs(taken, files["old_logprobs"], version=step)
            figures.append(trainer.train(taken, step, **files))
            running = running.after(consumed(results))
    return shares, figures


async def _play(engine: LocalEngine, right: set[int], step: int) -> AsyncIterator[Group]:
    """A step's groups, sampled with weights that are `LAG` updates old."""
    version = max(0, step - LAG)
    for g in range(GROUPS):
        visit, suite = step * GROUPS + g, list(SCALE)[g % 2]
        prompt = np.array([257, 30 + g % 2, 40 + visit % 7], np.int32)  # <|im_start|>, the suite, the task
        turns = await asyncio.gather(
            *(
                engine.generate(f"{visit}-{m}", prompt, Sampling(visit * MEMBERS + m, 0, NEW), version=version)
                for m in range(MEMBERS)
            )
        )
        members = []
        for m, turn in enumerate(turns):
            await engine.release(f"{visit}-{m}")
            mask = np.arange(len(prompt) + NEW) >= len(prompt)
            before = np.zeros(len(prompt), np.float32)
            versions = np.where(mask, turn.version, -1).astype(np.int64)
            logprobs = np.concatenate((before, turn.logprobs))
            segment = Segment(np.concatenate((prompt, turn.ids)), mask, logprobs, versions)
            reward = SCALE[suite] * sum(int(i) in right for i in turn.ids) / NEW
            members.append(trajectory([segment], task(visit, suite), m, visit, reward))
        yield Group(task(visit, suite), visit, tuple(members))


def _less(group: GroupRewards, penalties: dict[tuple[int, int], float]) -> GroupRewards:
    members = tuple(
        Member(m.member, m.status, m.reward, m.success, m.loss_tokens, penalties[group.visit, m.member])
        for m in group.members
    )
    return GroupRewards(group.task_id, group.visit, group.suite, members)
