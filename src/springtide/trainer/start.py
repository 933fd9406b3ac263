"""How a run comes up: what is checked before anything heavy starts, and the driver with all its processes.

Called by: `springtide.api`, the command line, benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from rich.console import Console

from springtide import pace
from springtide.chat import check_vocab, load_chat
from springtide.config import Config, ConfigError, SuiteEntry, make_config
from springtide.engine.vllm_server import check_python
from springtide.env.session import EnvironmentUnavailable
from springtide.env.suite import SuiteError
from springtide.ledger import Ledger
from springtide.models.presets import check_architecture, check_weights, max_positions, resolve_model, vocab_size
from springtide.observe.metrics import Display, Metrics
from springtide.observe.pace import PaceMeter, scale_for
from springtide.observe.progress import make_display
from springtide.observe.sinks import append_lines, open_sinks, read_records
from springtide.rollout.evaluate import eval_tasks
from springtide.rundir import RunDirectory, prepare
from springtide.runtime.local import Runtime, open_runtime
from springtide.trace import TaskRef
from springtide.trainer.checkpoint import CheckpointError, read_state
from springtide.trainer.driver import Driver
from springtide.trainer.loop import train
from springtide.trainer.suites import name_suites

_CALIBRATION = {"steps": 2, "minutes": 5.0}
_DEVICE_S = 120.0  # to import torch and make one tensor: the first touch of a GPU may take half a minute


@contextlib.asynccontextmanager
async def open_run(config: Config, *, resume: bool = False, calibrates: bool = False) -> AsyncIterator[Driver]:
    """Check everything that can be checked cheaply, start the run's processes, and hand out its driver.

    calibrates: under `runtime.pace.scale = "auto"` this is the run that measures, not the one that is paced.
    Raises: ConfigError (before anything heavy), SuiteError, ProcessFailed, LedgerError.
    """
    model_dir = await check(config)
    directory, lock = prepare(config, resume=resume)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lock.close)
        events = stack.enter_context(append_lines(directory.events))
        display = stack.enter_context(make_display(config, Console(quiet=True) if calibrates else None))
        given = config
        if not calibrates:
            config = await _scaled(config, directory, display, resume=resume)
        scale = config.runtime.pace.scale
        paced = config.runtime.pace.device != "none"
        meter = PaceMeter(1.0 if scale == "auto" else scale) if paced else None
        metrics = Metrics(open_sinks(config, directory.path), display, meter)
        stack.callback(metrics.close)
        ledger = Ledger(directory.ledger)
        stack.callback(ledger.close)
        checkpoint = newest_checkpoint(directory, ledger, display.note) if resume else None
        runtime = await stack.enter_async_context(
            open_runtime(config, directory.path, model_dir, checkpoint=checkpoint)
        )
        catalogs, evals, weights = {}, {}, {}
        split = "train" if config.eval.dev else config.eval.split
        for entry in config.suites:
            tasks = await _list_tasks(runtime, entry, entry.split)
            if not tasks:
                level = f"level {entry.level}" if entry.level else "its default level"
                raise ConfigError(f"suites: {entry.use} has no tasks in split {entry.split}, {level}")
            name = tasks[0].suite
            catalogs[name], weights[name] = tasks, entry.weight
            if not ledger.same_as_before(f"tasks of {name}", _fingerprint(tasks)):
                raise ConfigError(
                    f"the {entry.split} tasks of suite {name} are not those the run began with, so --resume would skip "
                    "or repeat some; start a new run, or use the suite's former version"
                )
            evals[name] = await _list_tasks(runtime, entry, split)
            evaluates = config.eval.at_ends or config.eval.every > 0
            if evaluates and not eval_tasks(evals[name], 1, dev=config.eval.dev):
                kind = "dev tasks" if config.eval.dev else f"tasks in split {split}"
                raise ConfigError(f"eval: suite {name} has no {kind} at level {tasks[0].level} to evaluate on")
        directory.begin(given)
        driver = Driver(config, directory, runtime, ledger, metrics, catalogs, evals, weights, checkpoint, events)
        await stack.enter_async_context(driver.scheduling())
        if not driver.fresh:
            metrics.resumed(driver.step, driver.elapsed, driver.incarnation)
        watchers = (
            asyncio.create_task(metrics.watch_loop(), name="loop lag and memory"),
            asyncio.create_task(driver.tell_waits(), name="what is waited for"),
        )
        try:
            yield driver
        finally:
            for watcher in watchers:
                watcher.cancel()


async def _scaled(config: Config, directory: RunDirectory, display: Display, *, resume: bool) -> Config:
    """`config` with a number for `runtime.pace.scale`: what a first start of this run found, or now a short run that is
    held back by nothing. Raises: ConfigError."""
    if config.runtime.pace.device == "none" or config.runtime.pace.scale != "auto":
        return config
    if not (resume and directory.pace.exists()):
        display.doing("calibrating the pace")
        trial = _calibration(config, directory)
        shutil.rmtree(trial.run_dir, ignore_errors=True)
        async with open_run(trial, calibrates=True) as driver:
            await train(driver)
        measured = read_records(RunDirectory(trial.run_dir).metrics)
        scale = scale_for(measured, config.engine.ranks, config.trainer.ranks)
        if scale is None:
            minutes = _CALIBRATION["minutes"]
            raise ConfigError(
                f"runtime.pace.scale: no step ended within the calibration's {minutes:g} minutes; give a number"
            )
        directory.write_json(directory.pace, {"scale": scale})
    scale = json.loads(directory.pace.read_text())["scale"]
    display.note(f"the pace's scale is {scale:g} (from {directory.pace})")
    table = config.runtime.pace.model_copy(update={"scale": scale})
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"pace": table})})


def _calibration(config: Config, directory: RunDirectory) -> Config:
    """A short run of the same load: nothing but its steps, whatever its episodes earn."""
    tree = config.model_dump(mode="json")
    tree["run"] |= {"dir": str(directory.path), "name": "calibration", **_CALIBRATION}
    tree["trainer"]["cold_start"]["steps"] = 0
    tree["algorithm"]["equal_rewards"] = "keep"
    tree["eval"] |= {"every": 0, "at_ends": False}
    tree["observe"] = {"progress": False, "report": False}
    return make_config(tree)


async def _list_tasks(runtime: Runtime, entry: SuiteEntry, split: str) -> tuple[TaskRef, ...]:
    try:
        return await runtime.catalog.catalog(entry.use, split, entry.level)
    except EnvironmentUnavailable as error:  # an author's sequence of tasks raises, or blocks its worker
        raise SuiteError(
            f"suite {entry.use}: its {split} tasks cannot be listed: {error}; try `springtide doctor env {entry.use}`"
        ) from error


def check_run(config: Config) -> Path:
    """`check`, where no event loop runs."""
    return asyncio.run(check(config))


async def check(config: Config) -> Path:
    """All that can be checked without starting the run; the model's directory. Raises: ConfigError and its kin."""
    model_dir = resolve_model(config.model.path)
    check_vocab(load_chat(model_dir, config.model.tool_format), vocab_size(model_dir))
    limit = max_positions(model_dir)
    if limit is not None and config.model.context > limit:
        raise ConfigError(f"model.context: {config.model.context} is more than the model's {limit} positions")
    if config.engine.kind == "local":
        check_architecture(model_dir)
    check_weights(model_dir)
    if config.reference.path is not None:
        check_weights(resolve_model(config.reference.path, key="reference.path"))
    for key, device in (("engine.device", config.engine.device), ("trainer.device", config.trainer.device)):
        if (why := _unusable(device)) is not None:
            raise ConfigError(f'{key}: {device!r} cannot be used here: {why}; "cpu" always can')
    if config.engine.kind == "vllm" and config.engine.vllm.python is not None:
        check_python(config.engine.vllm.python)
    names = await name_suites(config.suites, import_s=config.runtime.start_s)
    for i, (entry, name) in enumerate(zip(config.suites, names, strict=True)):
        if name in names[:i]:
            raise ConfigError(f"suites: {entry.use} is called {name}, as one before it is; rename one")
    pace.check(config)
    return model_dir


@functools.cache
def _unusable(device: str) -> str | None:
    """Why no tensor can be made and read on the device, or None. Asked of a process: the driver loads no torch."""
    if device == "cpu":
        return None
    code = (
        "import sys, torch\n"
        "try:\n"
        "    float(torch.ones(1, device=sys.argv[1]).sum())\n"
        "except Exception as error:\n"
        "    print(str(error).strip().splitlines()[0].rstrip('.'))\n"
    )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", code, device], capture_output=True, text=True, timeout=_DEVICE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_DEVICE_S:g} s"
    if asked.returncode != 0:
        return (asked.stderr.strip().splitlines() or ["its driver ended the process"])[-1]
    return asked.stdout.strip() or None


def newest_checkpoint(directory: RunDirectory, ledger: Ledger, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole and of the run's surviving lineage; None: none was written yet.

    What is newer is named and set aside as `NAME.unused`: the run will write those steps anew. Raises: CheckpointError
    if none can be used.
    """
    saved, unused = directory.saved(), []
    for path in saved:
        try:
            _, extra = read_state(path)
            if not ledger.survives(extra["incarnation"], extra["step"]):
                raise CheckpointError(f"{path} was left behind when the run went on from an earlier checkpoint")
        except CheckpointError as error:
            note(str(error))
            unused.append(path)
            continue
        for newer in unused:
            aside = newer.with_name(f"{newer.name}.unused")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)
        return path
    if saved:
        raise CheckpointError(f"every checkpoint in {directory.checkpoints} is damaged; start a new run")
    return None


def _fingerprint(tasks: Sequence[TaskRef]) -> str:
    return hashlib.sha256(json.dumps([(t.id, t.version, t.seed) for t in tasks]).encode()).hexdigest()
