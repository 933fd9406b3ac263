"""Playing the suites with a packaged nano, in this process: sampled and greedy success on dev tasks.

The agent loop, the engine and the environments are those of a training run. Called by: the command line.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from scripts.nano.gold import LEVEL, SUITES

from springtide.chat import load_chat
from springtide.engine.local.engine import EngineSettings, LocalEngine
from springtide.env import InProcessClient
from springtide.models.decoder import read_checkpoint
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary, play, summarise
from springtide.rollout.evaluate import EvalResult, eval_tasks, evaluate
from springtide.trace import TaskRef, Trajectory
from springtide.weights.store import WeightStore

_CONCURRENCY = 64
_CONTEXT, _NEW_TOKENS = 512, 64


def play_dev(
    directory: Path, *, tasks: int, temperature: float, seed: int = 0, split: str = "train"
) -> tuple[EvalResult, list[Trajectory]]:
    """Play the first `tasks` dev tasks of every suite once (or of `split`, if not `train`)."""
    return asyncio.run(_play(directory, tasks, temperature, seed, split))


async def _play(
    directory: Path, count: int, temperature: float, seed: int, split: str
) -> tuple[EvalResult, list[Trajectory]]:
    chat = load_chat(directory)
    trajectories: list[Trajectory] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = WeightStore(Path(scratch))
        store.publish(0, read_checkpoint(directory))
        settings = EngineSettings(model=str(directory), store=scratch)
        async with LocalEngine.open(settings) as engine, InProcessClient(SUITES) as env:
            await engine.load(0)

            async def one(spec: EpisodeSpec) -> EpisodeSummary:
                trajectory = await play(spec, env, engine, chat)
                trajectories.append(trajectory)
                return summarise(trajectory)

            def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
                return EpisodeSpec(
                    task=task,
                    visit=visit,
                    member=member,
                    retry=retry,
                    purpose="eval",
                    run_seed=seed,
                    temperature=temperature,
                    max_new_tokens=_NEW_TOKENS,
                    context=_CONTEXT,
                )

            chosen = {
                suite: eval_tasks(await env.catalog(suite, split, LEVEL), count, dev=split == "train")
                for suite in SUITES
            }
            result = await evaluate(chosen, one, spec, samples=1, concurrency=_CONCURRENCY)
    return result, trajectories
