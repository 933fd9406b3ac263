"""`springtide.train` and `springtide.evaluate`: the program from Python.

Called by: users, and the CLI, which is these functions with arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import numbers
import os
import sys
from pathlib import Path
from typing import Any

from springtide.chat import check_vocab, load_chat
from springtide.config import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Config,
    ConfigError,
    EngineTable,
    RuntimeTable,
    apply_set,
    load_config,
    make_config,
)
from springtide.engine.openai import ChatEndpoint, check_url
from springtide.env.local import LocalClient, LocalRunner
from springtide.models.presets import SHIPPED, check_weights, max_positions, resolve_model, vocab_size
from springtide.observe.metrics import Summary
from springtide.observe.report import write_report
from springtide.process import scratch_directory
from springtide.rollout.endpoint import play_endpoint
from springtide.rollout.episode import EpisodeSpec
from springtide.rollout.evaluate import EvalResult, eval_tasks
from springtide.rollout.evaluate import evaluate as run_evaluation
from springtide.rollout.pool import play_once
from springtide.rundir import RunDirectory, apart_from_place, load_run
from springtide.runtime.local import open_runtime
from springtide.trace import TaskRef, is_finite
from springtide.trainer.loop import train as run_loop
from springtide.trainer.start import open_run
from springtide.trainer.stop import Stop
from springtide.trainer.suites import find_level, name_suites

_MOST_EPISODES = 1_000_000


def train(config: Config | dict[str, Any] | str | Path, *, resume: bool = False) -> Summary:
    """Train as `config` says (a tree, a TOML file, or a checked Config) and return the run's summary.

    Raises: ConfigError, SuiteError and their kin before anything heavy starts; BrokenRun (StuckRun where nothing
    happens any more), ProcessFailed when the run cannot go on; KeyboardInterrupt on Ctrl-C and SIGTERM, with a
    checkpoint where that takes seconds; RuntimeError inside an event loop.
    """
    _needs_no_loop("train")
    checked, stop = as_config(config, resume=resume), Stop()

    async def run() -> Summary:
        async with open_run(checked, resume=resume) as driver, stop.on_signals(driver):
            return await run_loop(driver)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if stop.asked:
            raise KeyboardInterrupt from None
        raise
    finally:  # a run that was stopped or broke is what one wants to look at most
        if checked.observe.report and (checked.run_dir / "metrics.jsonl").exists():
            _report(checked.run_dir)


def as_config(config: Config | dict[str, Any] | str | Path, *, resume: bool = False) -> Config:
    """Any accepted form, checked. Raises: ConfigError."""
    if isinstance(config, Config):
        return config
    if isinstance(config, dict):
        return make_config(config)
    if isinstance(config, str | os.PathLike):
        return load_run(Path(config), resume=resume)
    raise ConfigError(f"a run is given as a Config, a dict or the path of a TOML file, not as {type(config).__name__}")


def _needs_no_loop(name: str) -> None:
    """Raises: RuntimeError where an event loop runs, before any coroutine is made that nobody would await."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"springtide.{name} runs an event loop of its own, and one runs here already: call it in a thread, as "
        f"await asyncio.to_thread(springtide.{name}, ...)"
    )


def _report(run: Path) -> None:
    try:
        write_report(run)
    except Exception as error:  # a picture that cannot be drawn must not hide how the run ended
        print(f"no report: {type(error).__name__}: {error}", file=sys.stderr)


def evaluate(
    target: str | Path,
    suite: str,
    *,
    split: str = "test",
    level: str | None = None,
    tasks: int = 64,
    samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
    dev: bool = False,
    model: str = "default",
    concurrency: int = 64,
    budget: int | None = None,
    seed: int = 0,
    sets: tuple[str, ...] = (),
) -> EvalResult:
    """Play the first `tasks` tasks of a suite's split, `samples` times each, and say how often they succeed.

    target: a run directory (its newest checkpoint), a Hugging Face directory, the name of a shipped model, or the URL
    of an OpenAI-compatible endpoint (then `model` names the model there). level: by default the one that the run
    trained the suite at, else the suite's default (`default_level`). temperature 0 is greedy. budget: tokens that an
    endpoint may be asked to read and write; episodes that it does not reach count as environment errors. sets: keys of
    the configuration to change, as "model.context=8192"; an episode may reach what the run allowed, else what the model
    can attend over. Raises: ConfigError, SuiteError, EndpointError (nobody answers there), ProcessFailed; RuntimeError
    inside an event loop.
    """
    _needs_no_loop("evaluate")
    _check_counts(tasks=tasks, samples=samples, concurrency=concurrency)
    _check_temperature(temperature)
    if budget is not None:
        _check_budget(target, budget)
    level = level or default_level(target, suite)
    config, path, adapter = _eval_config(target, suite, split, level, max_new_tokens, seed, tuple(sets))
    asyncio.run(name_suites(config.suites, import_s=config.runtime.start_s))
    if path is not None:
        check_vocab(load_chat(path, config.model.tool_format), vocab_size(path))
        check_weights(path)

    def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
        return EpisodeSpec.of(config, "eval", task, visit, member, retry, temperature=temperature)

    async def run() -> EvalResult:
        async with contextlib.AsyncExitStack() as stack:
            directory = RunDirectory(stack.enter_context(scratch_directory("springtide-eval-")))
            env: LocalClient
            if path is None:
                endpoint = await stack.enter_async_context(
                    ChatEndpoint(str(target), model, connections=concurrency, budget=budget)
                )
                await endpoint.probe()
                runner = LocalRunner((suite,), config.runtime.env_workers, directory.logs)
                await stack.enter_async_context(runner)
                env = await stack.enter_async_context(LocalClient(runner.addresses))
                play = functools.partial(play_endpoint, env=env, endpoint=endpoint)
            else:
                runtime = await stack.enter_async_context(
                    open_runtime(config, directory.path, path, checkpoint=adapter)
                )
                await runtime.trainer.call("publish", deadline_s=600, version=0)
                await runtime.load(0)
                env, play = runtime.catalog, functools.partial(play_once, runtime.pool)
            chosen = eval_tasks(await env.catalog(suite, split, level), tasks, dev=dev)
            if not chosen:
                raise ConfigError(f"suite {suite} has no {'dev ' if dev else ''}tasks in split {split}, level {level}")
            return await run_evaluation({chosen[0].suite: chosen}, play, spec, samples=samples, concurrency=concurrency)

    return asyncio.run(run())


def default_level(target: str | Path, suite: str) -> str:
    """The level `evaluate` plays where none is named. Raises: ConfigError, SuiteError."""
    file = RunDirectory(Path(target)).config
    entries = load_config(file).suites if os.path.isfile(file) else ()
    trained = (e.level for e in entries if apart_from_place(e.use) == apart_from_place(suite))
    return next(filter(None, trained), None) or asyncio.run(find_level(suite, import_s=RuntimeTable().start_s))


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or not 1 <= int(value) <= _MOST_EPISODES:
            raise ConfigError(f"{name}: must be a whole number from 1 to {_MOST_EPISODES:,}, not {value!r:.60}")


def _check_budget(target: str | Path, budget: Any) -> None:
    if not str(target).startswith(("http://", "https://")):
        raise ConfigError("budget: only an endpoint has one; a model that runs here is bounded by tasks and samples")
    if not isinstance(budget, numbers.Integral) or isinstance(budget, bool) or budget < 1:
        raise ConfigError(f"budget: must be a whole number of tokens, at least 1, not {budget!r:.60}")


def _check_temperature(value: Any) -> None:
    number = float(value) if is_finite(value) and not isinstance(value, bool) else math.nan
    if not (number == 0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE):
        raise ConfigError(
            f"temperature: must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, not {value!r:.60}"
        )


def _eval_config(
    target: str | Path,
    suite: str,
    split: str,
    level: str,
    max_new_tokens: int | None,
    seed: int,
    sets: tuple[str, ...] = (),
) -> tuple[Config, Path | None, Path | None]:
    """The configuration to evaluate under, the model's directory (None for an endpoint), and a checkpoint's adapter."""
    text = str(target)
    base: dict[str, Any] = {}
    path: Path | None = None
    adapter: Path | None = None
    if text.startswith(("http://", "https://")):
        try:
            check_url(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    else:
        directory = RunDirectory(Path(text))
        if directory.config.exists():
            saved = directory.saved()
            if not saved:
                raise ConfigError(f"{text} has no checkpoint yet")
            run = load_config(directory.config)
            base, path = {"model": run.model.model_dump(), "rollout": run.rollout.model_dump()}, saved[0]
            if run.trainer.lora.rank:
                base["trainer"] = run.trainer.model_dump()
                path, adapter = resolve_model(run.model.path), saved[0]
        else:
            path = resolve_model(text)
            most = min(max_positions(path) or 4096, EngineTable().kv_tokens)
            base["model"] = {"context": SHIPPED.get(text, most)}
    base["suites"] = [{"use": suite, "split": split, "level": level}]
    base["run"] = {"name": "eval", "seed": seed}
    if max_new_tokens is not None:
        base.setdefault("rollout", {})["max_new_tokens"] = max_new_tokens
    read = ("rollout", "runtime") if path is None else ("model", "engine", "rollout", "runtime")
    for item in sets:
        key = item.partition("=")[0].strip()
        if key.partition(".")[0] not in read or key == "model.path":
            of = "an endpoint" if path is None else "a model"
            raise ConfigError(f"--set {item!r}: the evaluation of {of} reads only the tables {', '.join(read)}")
        apply_set(base, item)
    return make_config(base), path, adapter
