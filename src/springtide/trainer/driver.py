"""The driver: the one process that decides, keeps the ledger, and supervises all others. It never sees a token.

Owns: the run's state between steps (versions, running statistics, what is ready) and every step of the loop as one
method. Invariants: a step is recorded as trained only after the trainer took it; weights are in use only after every
engine verified their fingerprint; every wait has a deadline and says which predicate holds it, for as long as it lasts.
Called by: `trainer.loop`, inside `trainer.start.open_run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from springtide.algorithms.advantages import GroupRewards, Member, RunningMoments, advantages, consumed
from springtide.config import Config
from springtide.ledger import Ledger
from springtide.observe.metrics import Metrics, Summary, commit, summarise
from springtide.observe.plots import label_of
from springtide.observe.sinks import plain, read_records
from springtide.process import CONTROL_S, task_group
from springtide.rollout.draws import make_samplers
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.rollout.evaluate import EvalResult, eval_tasks, evaluate
from springtide.rollout.feeder import OF_EPISODES, BrokenRun, Feeder, Versions
from springtide.rollout.pool import play_once
from springtide.rundir import RunDirectory
from springtide.runtime.local import Runtime
from springtide.schedule.events import (
    Began,
    Evaluation,
    Held,
    Pause,
    Resume,
    Route,
    StepEnded,
    StepStarted,
    Updated,
    event_to_json,
)
from springtide.schedule.policy import Batch, Bounds, Layout, Wait
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import make_policy
from springtide.trace import TaskRef, atomic_write, make_version
from springtide.trainer.checkpoint import NotFinite
from springtide.trainer.clock import WAITS, Clock
from springtide.trainer.frozen import STEP_S, Frozen
from springtide.trainer.roles import Roles
from springtide.wire import ConnectionLost, RemoteError

_EVAL_EPISODES = 256  # evaluation episodes at once
_WITHIN_EPISODES = (*OF_EPISODES, Route, Pause, Resume)  # what `observe.events = groups` leaves out
_SLACK_S = 60.0  # beyond a group's deadline, until a wait without any event counts as stuck
_LOOK_S = 1.0  # at the clock, while no event comes
_TELL_S = 0.5  # how often the display hears what the loop waits for
_REFUSED_STEPS = 5  # in a row, then the run ends
_KEPT = 4  # evaluation episodes a suite that are kept for people to read
_KEPT_ENDS = 16  # the same of the sampled ones at start and end, among which the report finds one that changed


class StuckRun(BrokenRun):
    """Nothing happened for as long as anything may take. The text names the predicate that blocks."""


class Driver:
    """One incarnation of a run. Built by `open_run`."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        runtime: Runtime,
        ledger: Ledger,
        metrics: Metrics,
        catalogs: dict[str, tuple[TaskRef, ...]],
        eval_catalogs: dict[str, tuple[TaskRef, ...]],
        weights: dict[str, float],
        checkpoint: Path | None,
        events: Any,
    ) -> None:
        self.config, self.directory, self._runtime, self._ledger = config, directory, runtime, ledger
        self.metrics, self._events = metrics, events
        extra = json.loads((checkpoint / "extra.json").read_text()) if checkpoint else {}
        self.fresh = checkpoint is None
        self.step: int = extra.get("step", 0)
        self._running = RunningMoments.from_json(extra.get("running", {}))
        self._clock = Clock(extra.get("trained_s", 0.0))
        self.incarnation = ledger.begin(self.step)
        self._versions = Versions(make_version(self.incarnation, self.step))
        self._stale_step = -1
        trainable = {s: tuple(t for t in tasks if "dev" not in t.tags) for s, tasks in catalogs.items()}
        self._catalogs, self._eval_catalogs = trainable, eval_catalogs
        bounds = Bounds(
            config.trainer.groups,
            config.rollout.concurrency,
            config.staleness.bound,
            config.staleness.overage,
            members=config.rollout.group.n,
            environments=config.rollout.environments,
        )
        self._state = Readiness(weights, step=self.step, consumed=ledger.consumed())
        size, sharded = config.trainer.ranks, config.trainer.sharding == "fsdp"
        layout = Layout(config.engine.ranks, 0, size, size if config.trainer.lend else 0, sharded=sharded)
        self._policy = make_policy(config.schedule.policy, bounds, layout)
        self._state.follow(self._policy)
        self._feeder = Feeder(
            config,
            ledger=ledger,
            state=self._state,
            policy=self._policy,
            samplers=make_samplers(config, trainable, weights, ledger),
            pool=runtime.pool,
            versions=self._versions,
            directory=directory.trajectories,
            record=self._record,
            note=lambda text: metrics.note(self.step, text),
            switch=lambda action: self._roles.ask(action),
        )
        self._frozen = Frozen(config, runtime, directory)
        self._roles = Roles(config, runtime, self._state, self._feeder.apply)
        now = time.time()
        self._feeder.apply(Began(now, self.step, self._state.mixture, dict(self._state.consumed)), Held(now, True))
        self._synchronous = config.schedule.policy == "synchronous"
        self._pending_eval: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._saved_step = self.step if checkpoint else -1
        self._refused = 0
        self._stepping = False  # an optimiser step is under way
        self._feeding = False  # groups are drawn
        self._after_step: Callable[[], object] | None = None  # to be called when it is recorded

    # --- the sentence -----------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds the loop has run, over all incarnations."""
        return self._clock.elapsed

    @property
    def progress(self) -> float:
        """How much of the run is trained, in [0, 1]: of its steps, or of its minutes where those end it earlier."""
        run = self.config.run
        timed = self._clock.elapsed / (run.minutes * 60) if run.minutes is not None else 0.0
        return min(1.0, max(self.step / run.steps, timed))

    @property
    def finished(self) -> bool:
        return self.progress >= 1.0

    async def cold_start(self) -> None:
        """Supervised steps on the environments' own solutions of a fixed set of training tasks."""
        cold = self.config.trainer.cold_start
        if cold.steps == 0:
            return
        tasks = [task for suite in self._catalogs.values() for task in suite[: cold.tasks]]
        paths: list[str] = []

        async def gold(visit: int, task: TaskRef) -> None:
            path = self.directory.trajectories / f"gold-{visit:06d}.msgpack"
            spec = EpisodeSpec.of(self.config, "gold", task, visit, 0, 0)
            summary = await play_once(self._runtime.pool, spec, keep=path)
            if summary.cause is not None or not summary.success:
                raise BrokenRun(f"the gold solution of {task.id} does not succeed ({summary.status}: {summary.detail})")
            paths.append(str(path))
            self.metrics.doing("cold start: gold episodes", len(paths), len(tasks))

        with self._clock.measure("cold_start"):
            await _bounded(64, [gold(visit, task) for visit, task in enumerate(tasks)])
            options = {"steps": cold.steps, "batch": cold.batch, "lr": cold.lr}
            async with task_group() as watching:
                watcher = watching.create_task(self._tell_cold_start(cold.steps))
                told = await self._runtime.trainer.call(
                    "cold_start", deadline_s=STEP_S, paths=tuple(sorted(paths)), **options
                )
                watcher.cancel()
        if refused := told["refused_steps"]:
            text = f"{refused} of {cold.steps} steps of the cold start were refused, their loss or gradient not finite"
            if refused == cold.steps:
                raise BrokenRun(f"{text}; lower trainer.cold_start.lr, or mend the model")
            self.metrics.note(self.step, text)
        fell = f"from {told['loss_start']:.3g} to {told['loss_end']:.3g}"
        self.metrics.note(self.step, f"the loss of the cold start went {fell} in {cold.steps} steps")

    @contextlib.asynccontextmanager
    async def scheduling(self) -> AsyncIterator[None]:
        """Let the policy place what plays during the block, whoever asked for it."""
        async with task_group() as tasks, self._roles.announced():
            self._tasks = tasks
            beside = [tasks.create_task(self._feeder.run(), name="feeder")]
            for worker in self._runtime.workers:
                beside.append(tasks.create_task(self._feeder.listen(worker), name=f"news of {worker.name}"))
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()

    @contextlib.asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Draw and play beside the block; at its end every pending group ends as `run_ended`."""
        self._clock.start()
        self.metrics.begin(await self._runtime.engine_stats(), await self._paced())
        try:
            self._feeder.resume()
            self._feeding = True
            self._roles.open_trainers()
            self._feeder.hold(False)
            yield
            self._hold()
            await self._feeder.end("run_ended")  # first: what nobody will train must not slow the evaluation
            await self._join_evaluation()
        finally:
            self._hold()
            self._clock.stop()

    def _hold(self) -> None:
        self._feeding = False
        self._feeder.hold(True)

    async def next_batch(self) -> tuple[int, ...]:
        """Wait until the policy's batch is ready; the visits of it, or none once the run is over. Raises: StuckRun."""
        patience = self.config.rollout.group.deadline_s + _SLACK_S
        quiet_s, seen = 0.0, self._feeder.events
        while not self.finished:
            choice = self._policy.batch(self._state)
            if isinstance(choice, Batch):
                self._feeder.apply(StepStarted(time.time(), choice.visits))
                return choice.visits
            with self._clock.measure(f"wait_{choice.cause}"):
                await self._feeder.changed(_LOOK_S)
            # During an evaluation groups may wait for long, as it does not count against their deadlines.
            happened, seen = self._feeder.events > seen, self._feeder.events
            quiet_s = 0.0 if happened or self._state.evaluating else quiet_s + _LOOK_S
            if quiet_s >= patience:
                blocked = self._policy.blocked(self._state)
                raise StuckRun(f"nothing happened for {patience:g} s: {choice.reason}; admission: {blocked}")
        return ()

    async def tell_waits(self) -> None:
        """Tell the display what the loop waits for, until cancelled: also while nothing happens, and who is silent."""
        while True:
            await asyncio.sleep(_TELL_S)
            cause, silent = self._clock.cause, self._runtime.silent()
            reason, admission = WAITS.get(cause or "", ""), "nothing"
            choice = self._policy.batch(self._state)
            if cause is not None and cause.startswith("wait_") and isinstance(choice, Wait):
                reason, admission = choice.reason, self._policy.blocked(self._state)
            if reason or silent:
                self.metrics.waiting("; ".join(filter(None, (reason, silent))), admission)

    async def learn(self, visits: tuple[int, ...]) -> None:
        """One optimiser step on exactly `visits`."""
        self._stepping = True
        summaries = [self._feeder.summaries.pop(visit) for visit in visits]
        with self._clock.measure("train"):
            penalties = await self._frozen.penalties(
                tuple(
                    {"path": self._group_file(visit), "member": member}
                    for visit, s in zip(visits, summaries, strict=True)
                    for member, *_, loss_tokens in s["members"]
                    if loss_tokens > 0
                )
            )
        groups = [
            GroupRewards(
                s["task"],
                visit,
                s["suite"],
                tuple(
                    Member(member, status, reward, success, tokens, penalties.get((visit, member), 0.0))
                    for member, status, reward, success, tokens in s["members"]
                ),
            )
            for visit, s in zip(visits, summaries, strict=True)
        ]
        results = advantages(groups, self.config.algorithm, self._running)
        items = tuple(
            {
                "path": self._group_file(result.visit),
                "member": member,
                "advantage": value,
                "suite": result.suite,
            }
            for result in results
            for member, value in sorted(result.values.items())
        )
        with self._clock.measure("train"):
            trainer = self.config.trainer
            left = (1 - self.progress) / trainer.lr_decay if trainer.lr_decay else 1.0
            lr = trainer.lr * min(1.0, left)
            learned, costs = await self._frozen.train(items, self._versions.current, lr, self.step + 1)
        self._feeder.apply(*costs)
        if penalties:
            learned["kl_penalty"] = fmean(penalties.values())
        self.step += 1
        if learned["refused"] is None:
            self._refused = 0
            self._running = self._running.after(consumed(results))
            self._ledger.trained(list(visits), self.incarnation, self.step)
            unscored = {(r.visit, member) for r in results for member in r.unscored}
            self._feeder.counts.discarded["unscored"] += sum(
                m.loss_tokens for g in groups for m in g.members if (g.visit, m.member) in unscored
            )
        else:
            self._refuse(visits, learned)
        await self._log_step(summaries, learned)
        self._stepping = False
        if self._after_step is not None:
            self._after_step()
        if self._refused >= _REFUSED_STEPS:
            raise BrokenRun(
                f"the last {self._refused} steps were refused: {_refusal(learned)} not finite at step {self.step}; "
                "lower trainer.lr or algorithm.kl_coef, or resume from an earlier checkpoint (trainer.grad_norm and "
                "trainer.ratio_max in metrics.jsonl show where it began)"
            )

    async def open_frozen(self) -> None:
        """Give the frozen policies their weights."""
        await self._frozen.open()

    async def publish(self) -> None:
        """Publish the trainer's weights under this step's version, and wait until every engine verified them."""
        if self.config.engine.slots == 1:
            await self._join_evaluation()  # its version is the one that the engines hold
        version = make_version(self.incarnation, self.step)
        with self._clock.measure("publish"):
            if self._state.step_running:
                self._feeder.apply(Updated(time.time()))
                await self._feeder.synced()
                await self._roles.settled()
            with _written(f"cannot publish weights to {self._runtime.weights}"):
                await self._runtime.trainer.call("publish", deadline_s=STEP_S, version=version)
            refresh = self.config.rollout.stale_probability > 0 and (
                self._stale_step < 0 or self.step - self._stale_step >= self.config.rollout.stale_refresh
            )
            await self._runtime.load(version, stale=version if refresh else None)
        self._versions.current = version
        if refresh:
            self._versions.stale, self._stale_step = version, self.step
        self._feeder.hold(self._synchronous or not self._feeding)  # it evaluates before it draws; see evaluate_if_due
        if self._state.step_running:
            self._feeder.apply(StepEnded(time.time(), self.step))

    async def checkpoint(self) -> None:
        """Write the trainer's whole state; keep the newest few."""
        if self._saved_step == self.step:
            return
        path = self.directory.checkpoint(self.step)
        extra = {
            "step": self.step,
            "incarnation": self.incarnation,
            "running": self._running.to_json(),
            "trained_s": self._clock.elapsed,
        }
        with self._clock.measure("checkpoint"):
            self._ledger.sync()
            with _written(f"cannot write checkpoint {path}"):
                await self._runtime.trainer.call("save", deadline_s=STEP_S, path=str(path), extra=extra)
        self._saved_step = self.step
        await self._runtime.trainer.call(
            "forget",
            deadline_s=CONTROL_S,
            paths=tuple(map(str, self.directory.saved()[self.config.trainer.checkpoint_keep :])),
        )

    def stop(self, now: Callable[[], object]) -> None:
        """Call `now` to end the loop: at once, or when the optimiser step under way is recorded."""
        if self._stepping:
            self._after_step = now
        else:
            now()

    async def save_stopped(self) -> None:
        """Save what a loop that was stopped has learned, unless a step is half done, or a cold start not done."""
        if self._saved_step >= 0 and not self._stepping:
            await self.checkpoint()

    async def checkpoint_if_due(self) -> None:
        if self.step % self.config.trainer.checkpoint_every == 0:
            await self.checkpoint()

    async def evaluate(self, label: str) -> None:
        """Evaluate the current weights at the run's "start" or "end", once, and wait for the result."""
        done = any(r["kind"] == "eval" and r["label"] == label for r in read_records(self.directory.metrics))
        if self.config.eval.at_ends and not done:  # a run killed in its evaluation at the start makes it up
            with self._clock.measure("evaluate"):
                await self._evaluate(label, self._versions.current, self.step)

    async def evaluate_if_due(self) -> None:
        """Start an evaluation of this step's weights beside training, pinned to them; at most one at a time."""
        every = self.config.eval.every
        version, step = self._versions.current, self.step
        if every == 0 or step % every or self.finished:
            pass
        elif self._synchronous:
            with self._clock.measure("evaluate"):
                await self._evaluate(f"step {step}", version, step)
        else:
            await self._join_evaluation()
            await self._runtime.pin(version)
            assert self._tasks is not None
            self._pending_eval = self._tasks.create_task(self._evaluate(f"step {step}", version, step, pinned=True))
        self._feeder.hold(self.finished)

    async def summarise(self) -> Summary:
        """Write and return the run's summary."""
        self.metrics.ended(self.step, self._feeder.take_counts(), await self._runtime.engine_stats())
        summary = summarise(
            self.directory.metrics,
            self._ledger.audit(),
            seed=self.config.run.seed,
            commit=commit(),
            peak_pss_mib=self.metrics.peak_pss_mib,
        )
        self.directory.write_json(self.directory.summary, summary.to_json())
        if summary.pace is not None and summary.pace["void"]:
            self.metrics.note(self.step, summary.pace["void"])
        return summary

    # --- helpers ----------------------------------------------------------------------------------------------------

    async def _evaluate(self, label: str, version: int, step: int, *, pinned: bool = False) -> None:
        options = self.config.eval
        tasks = {
            suite: eval_tasks(catalog, options.tasks, dev=options.dev) for suite, catalog in self._eval_catalogs.items()
        }
        self._feeder.apply(Evaluation(time.time(), True))
        try:
            sampled = await self._evaluate_at(tasks, version, self.config.rollout.temperature, options.samples, label)
            greedy = await self._evaluate_at(tasks, version, 0.0, 1, f"{label} greedy") if options.greedy else None
        finally:
            self._feeder.apply(Evaluation(time.time(), False))
            if pinned:
                await self._runtime.unpin()
        episodes = (*sampled.episodes, *(greedy.episodes if greedy else ()))
        file = self.directory.evaluation(label.replace(" ", "-"))
        file.parent.mkdir(exist_ok=True)
        atomic_write(file, "".join(json.dumps(plain(asdict(e))) + "\n" for e in episodes).encode())
        self.metrics.evaluation(label, step, sampled, greedy)

    async def _evaluate_at(
        self, tasks: dict[str, list[TaskRef]], version: int, temperature: float, samples: int, label: str
    ) -> EvalResult:
        total = sum(map(len, tasks.values())) * samples
        if self._synchronous:
            worker = await self._runtime.pool.acquire()
            with contextlib.suppress(ConnectionLost):
                visits = tuple(range(sum(map(len, tasks.values()))))
                await worker.call("expect", deadline_s=CONTROL_S, purpose="eval", visits=visits, members=samples)
        most = _KEPT_ENDS if label in ("start", "end") else _KEPT
        kept = {task.id for chosen in tasks.values() for task in chosen[:most]}
        shown, ended = label_of(label, self.config.trainer.cold_start.steps), 0

        def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
            return EpisodeSpec.of(
                self.config, "eval", task, visit, member, retry, temperature=temperature, version=version
            )

        async def play(spec: EpisodeSpec) -> EpisodeSummary:
            nonlocal ended
            name = f"eval-{label.replace(' ', '-')}-{spec.task.suite}-{spec.task.index:05d}.msgpack"
            keep = spec.member == 0 and spec.task.id in kept
            path = self.directory.trajectories / name
            summary = await play_once(self._runtime.pool, spec, keep=path if keep else None, places=self._feeder.places)
            ended += 1
            if self._clock.since is None:  # the loop stands still for it
                self.metrics.doing(f"evaluation ({shown}): episodes", min(ended, total), total)
            return summary

        return await evaluate(
            tasks, play, spec, samples=samples, concurrency=total if self._synchronous else min(total, _EVAL_EPISODES)
        )

    def _refuse(self, visits: tuple[int, ...], learned: dict[str, Any]) -> None:
        """The trainer took no step: its groups end untrained, by name."""
        self._refused += 1
        for visit in visits:
            self._ledger.drop(visit, "refused_step")
        counts = self._feeder.counts
        counts.dropped["refused_step"] += len(visits)
        counts.discarded["refused_step"] += learned["loss_tokens"]
        learned["loss_tokens"] = 0
        self.metrics.note(self.step, f"step {self.step} was refused, its {_refusal(learned)} is not finite")

    def _group_file(self, visit: int) -> str:
        return str(self.directory.trajectories / f"{visit:08d}.msgpack")

    async def _tell_cold_start(self, steps: int) -> None:
        """Tell the display how far the trainer's cold start is, until cancelled."""
        while True:
            status = await self._runtime.trainer.call("status", deadline_s=CONTROL_S)
            self.metrics.doing("cold start: supervised steps", status["steps"], steps)
            await asyncio.sleep(_TELL_S)

    async def _join_evaluation(self) -> None:
        if self._pending_eval is not None:
            with self._clock.measure("evaluate"):
                await self._pending_eval
            self._pending_eval = None

    async def _log_step(self, summaries: list[dict[str, Any]], learned: dict[str, Any]) -> None:
        self.metrics.step(
            step=self.step,
            summaries=summaries,
            learned=learned,
            counts=self._feeder.take_counts(),
            spent=self._clock.spent,
            elapsed=self._clock.elapsed,
            engines=await self._runtime.engine_stats(),
            state=self._state,
            restarts=self._runtime.restarts(),
            paced=await self._paced(),
        )

    async def _paced(self) -> dict[str, float]:
        return await self._runtime.pace_counts() if self.config.runtime.pace.device != "none" else {}

    def _record(self, event: Any) -> None:
        of_episode = isinstance(event, _WITHIN_EPISODES)
        if of_episode and self.config.observe.events == "groups":
            return
        self._events.write(json.dumps(event_to_json(event)) + "\n")
        if not of_episode:
            self._events.flush()


def _refusal(learned: dict[str, Any]) -> str:
    tensor = learned["refused_tensor"]
    return f"{learned['refused']}{f' (first that of {tensor})' if tensor else ''}"


@contextlib.contextmanager
def _written(failed: str) -> Iterator[None]:
    """The trainer writes weights in the block: what it cannot write, and what must not be, is one line and the end."""
    try:
        yield
    except RemoteError as error:
        if error.kind == NotFinite.__name__:
            raise BrokenRun(error.message) from error
        why = " ".join(error.message.split())
        raise BrokenRun(f"{failed}: {why}; make room there and continue with --resume") from error


async def _bounded(limit: int, work: list[Any]) -> None:
    """Run coroutines, at most `limit` at once; the first failure ends all."""
    gate = asyncio.Semaphore(limit)

    async def one(item: Any) -> None:
        async with gate:
            await item

    async with task_group() as tasks:
        for item in work:
            tasks.create_task(one(item))
