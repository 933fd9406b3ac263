"""What the benchmarks that train share: cells of a configuration, and evaluations as a run makes them.

Owns: what such a cell's key covers (the resolved configuration, the code of the arm, every source of the package that
a run imports, the model's files). Invariant: two evaluations of one configuration play the same tasks with the same
seeds.
Called by: `kills`, `learning`, `multitask`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import SOURCES, Cell, Json, fingerprint, read_lines

from springtide.config import Config
from springtide.models.presets import resolve_model
from springtide.rollout.episode import EpisodeSpec
from springtide.rollout.evaluate import EvalResult, eval_tasks
from springtide.rollout.evaluate import evaluate as play_all
from springtide.rollout.pool import play_once
from springtide.rundir import RunDirectory
from springtide.runtime.local import Runtime
from springtide.trace import TaskRef

_EPISODES = 256  # at once in an evaluation; as in a run


def make_cell(
    name: str, config: Config, program: Sequence[Callable[..., Any]], *, suites: Sequence[str] = (), **more: Any
) -> Cell:
    """`program`: the functions of the benchmark that the arm runs; its key covers them, the package's sources, and the
    model. suites: those it plays, if others than `config` names."""
    tree = config.model_dump(mode="json", exclude={"observe": True, "run": {"dir", "name"}})
    code = "\n".join(ast.dump(ast.parse(inspect.getsource(f))) for f in program)
    sources = _hash_sources(tuple(suites or (s.use for s in config.suites)), resolve_model(config.model.path))
    return Cell(name, {**tree, **more, "program": hashlib.sha256(code.encode()).hexdigest()[:16]}, sources)


@functools.cache
def _hash_sources(suites: tuple[str, ...], model: Path) -> str:
    entries = ["springtide.trainer.loop", *(f"springtide.suites.{s}" for s in suites if ":" not in s)]
    files = [Path(s.partition(":")[0]) for s in suites if ":" in s]
    return fingerprint(entries, [SOURCES / "suites", SOURCES / "engine", model, *files])


async def publish(runtime: Runtime, version: int) -> None:
    """Put the trainer's weights into every engine, under `version`."""
    await runtime.trainer.call("publish", deadline_s=600, version=version)
    await runtime.load(version)


async def evaluate(config: Config, runtime: Runtime, version: int) -> Json:
    """Suite -> figures, sampled and greedy, with the tasks and the seeds of a run's evaluations."""
    tasks = await choose_tasks(config, runtime)
    sampled = await play(config, runtime, tasks, version=version, samples=config.eval.samples)
    greedy = await play(config, runtime, tasks, version=version, samples=1, temperature=0.0)
    return {s: figures(asdict(result), greedy.suites[s].success) for s, result in sampled.suites.items()}


async def choose_tasks(config: Config, runtime: Runtime) -> dict[str, list[TaskRef]]:
    """Suite -> the tasks that a run evaluates on."""
    options = config.eval
    split = "train" if options.dev else options.split
    tasks: dict[str, list[TaskRef]] = {}
    for entry in config.suites:
        chosen = eval_tasks(
            await runtime.catalog.catalog(entry.use, split, entry.level), options.tasks, dev=options.dev
        )
        tasks[chosen[0].suite] = chosen
    return tasks


async def play(
    config: Config,
    runtime: Runtime,
    tasks: dict[str, list[TaskRef]],
    *,
    version: int,
    samples: int,
    temperature: float | None = None,
    first: int = 0,
    stale: int | None = None,
) -> EvalResult:
    """Every task `samples` times; members count from `first`, so that no two calls need share their seeds.

    stale: a second version, that each turn is drawn from with `rollout.stale_probability`.
    """

    def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
        more = {"temperature": temperature, "version": version, "stale_version": stale}
        return EpisodeSpec.of(config, "eval", task, visit, first + member, retry, **more)

    episodes = functools.partial(play_once, runtime.pool)
    return await play_all(tasks, episodes, spec, samples=samples, concurrency=_EPISODES)


def evaluations(run: RunDirectory) -> Json:
    """When ("start", "end") -> suite -> figures, as a run evaluated itself."""
    evals = [record for record in read_lines(run.metrics) if record["kind"] == "eval"]
    return {r["label"]: {name: figures(s, s["greedy"]) for name, s in r["suites"].items()} for r in evals}


def figures(suite: Json, greedy: float) -> Json:
    """What a cell keeps of a suite's evaluation."""
    return {
        "sampled": suite["success"],
        "greedy": greedy,
        **{name: suite[name] for name in ("episodes", "low", "high", "env_errors", "tokens")},
    }
