"""A trainer or reference rank: one process that holds a policy, trains it, and says what its log-probs are.

Owns: the policy, its optimiser, the step, publication and checkpoints. Invariants: trajectories, weights and log-probs
travel as files, only their names and figures over the socket; torch work runs one call at a time on one thread, so the
socket answers `status` meanwhile and equal calls give equal bits; a step whose loss or gradient is not finite is
refused and counted, the weights untouched.
Called by: the driver, through `process.start_process(name, "springtide.trainer.rank:main", {})` and RPC; every public
method of `Rank` is one RPC method, its keyword arguments the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from springtide.algorithms.losses.kl import MAX_KL, estimate
from springtide.config import Config, make_config
from springtide.pace import Pace
from springtide.trace import version_step
from springtide.trainer import checkpoint as files
from springtide.trainer.checkpoint import CheckpointError
from springtide.trainer.collective import Collective, part_of
from springtide.trainer.data import DataError, StepData, load_step, write_logprobs
from springtide.trainer.lora import read_adapter
from springtide.trainer.model import Policy, load_policy
from springtide.trainer.optim import Optimizer, StepResult
from springtide.trainer.parts import Field, Loaded, Parts, Span, part_file
from springtide.trainer.shards import TensorFile, local, recompute_activations, shard, write_tensors
from springtide.trainer.step import (
    Shape,
    Sums,
    accumulate_policy,
    accumulate_supervised,
    compute_logprobs,
    merge,
    stream_logprobs,
    timed,
)
from springtide.weights.files import whole
from springtide.weights.store import Canary, WeightStore
from springtide.wire import Peer, serve

METHODS = frozenset(
    {"init", "train", "supervised", "cold_start", "logprobs", "kl", "publish", "pull", "save", "forget", "export"}
)
_BFLOAT16_TOLERANCE = 0.5  # of a canary that is computed in it here and in float32 by an engine, as in `engine.local`
_CANARY_TOKENS = 16  # ids of the prompt whose log-probs go with published weights


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Process entry: serve `Rank`'s methods until cancelled. `args`, if not empty, is a first call of `init`."""
    rank = Rank()
    loop = asyncio.get_running_loop()
    busy: list[tuple[str, float]] = []
    transformers_logging.disable_progress_bar()
    thread = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(1,))
    try:

        async def handle(peer: Peer, method: str, payload: dict[str, Any]) -> Any:
            if method == "status":
                name, since = busy[0] if busy else (None, time.monotonic())
                return {**rank.status(), "busy": name, "busy_s": time.monotonic() - since}
            if method not in METHODS:
                known = ", ".join(sorted(METHODS))
                raise ValueError(f"a trainer rank has no method {method!r}; it has status, {known}")
            call: Callable[..., Any] = getattr(rank, method)

            def work() -> Any:
                busy.append((method, time.monotonic()))
                try:
                    return call(**payload)
                finally:
                    busy.clear()

            return await loop.run_in_executor(thread, work)

        if args:
            await loop.run_in_executor(thread, lambda: rank.init(**args))
        async with serve(socket_path, handle):
            await asyncio.Event().wait()
    finally:
        thread.shutdown(wait=rank.alone)  # one of a world may wait in a collective for a rank that is gone


class Rank:
    """The state behind the socket. Every method but `init` and `status` needs `init` first."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._optimizer: Optimizer | None = None
        self._config: Config | None = None
        self._store: WeightStore | None = None
        self._world = Collective()
        self._pace: Pace | None = None
        self._frozen = Loaded(None)
        self.version = -1
        self.refused = 0

    @property
    def alone(self) -> bool:
        return self._world.size == 1

    def init(
        self,
        config: dict[str, Any],
        model: str,
        checkpoint: str | None = None,
        store: str | None = None,
        role: Literal["trainer", "reference"] = "trainer",
        world: dict[str, Any] | None = None,
        reference: str = "",
    ) -> dict[str, Any]:
        """Load the policy: from `checkpoint` if given, else from `model` (a Hugging Face directory).

        config: the resolved tree (`Config.model_dump(mode="json")`). store: directory of the weight store. A reference
        has no optimiser and no adapter; a trainer with one takes it from `checkpoint` and all else from `model`.
        world: `{rank, size, meet, ...}` (see `Collective.join`) for one of several trainer ranks, of which each gets
        every call with the same payload. reference: a directory that will hold the KL reference, for a trainer that
        computes it itself.
        Returns `{parameters, vocab_size, steps, version, extra}`: trained parameters; extra is what `save` was given,
        None without a checkpoint. Raises: ModelError, CheckpointError, ConfigError.
        """
        self._config, self._frozen = make_config(config), Loaded(Path(reference) if reference else None)
        self._store = WeightStore(Path(store)) if store else None
        device = self._config.trainer.device
        trainer, sharded = self._config.trainer, role == "trainer" and self._config.trainer.sharding == "fsdp"
        if world is not None:
            self._world = Collective.join(**world, device=device)
            device = "cpu" if sharded else str(self._world.device)  # sharding moves a layer's rows at a time
        self._pace = Pace.of(self._config, role)
        torch.manual_seed(self._config.run.seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        verified = self._world.rank > 0
        state, extra = files.read_state(Path(checkpoint), verified=verified) if checkpoint else ({}, None)
        lora = self._config.trainer.lora if role == "trainer" and self._config.trainer.lora.rank else None
        if checkpoint and bool(lora) != ("base" in state):
            held = "an adapter" if "base" in state else "whole weights"
            raise CheckpointError(f"{checkpoint} holds {held}; trainer.lora.rank must be what it was")
        self._policy = load_policy(Path(model if lora else checkpoint or model), device)
        if lora is not None:
            self._policy.adapt(lora, self._config.run.seed)
        if role == "trainer" and trainer.activation_checkpointing:
            recompute_activations(self._policy.model)
        if sharded:
            shard(self._policy, trainer, self._world)
            if self._policy.adapter is not None:
                self._policy.adapter.mark_start()
        self._optimizer = Optimizer(self._policy, trainer, self._world) if role == "trainer" else None
        self.version = state.get("version", -1)
        if checkpoint and self._optimizer is not None:
            self._restore(Path(checkpoint), state)
        return {
            "parameters": sum(p.numel() for p in self._policy.parameters()),
            "vocab_size": self._policy.vocab_size,
            "steps": self._optimizer.steps if self._optimizer else 0,
            "version": self.version,
            "extra": extra,
        }

    def status(self) -> dict[str, Any]:
        steps = self._optimizer.steps if self._optimizer else 0
        counts = self._pace.counts if self._pace else {}
        ready = self._policy is not None
        return {"version": self.version, "steps": steps, "refused": self.refused, "ready": ready, "pace": counts}

    def train(
        self,
        items: tuple[dict[str, Any], ...],
        version: int,
        ref_logprobs: str | None = None,
        old_logprobs: str | None = None,
        lr: float | None = None,
        streamed: bool = False,
    ) -> dict[str, Any]:
        """One optimiser step of the configured policy loss, at rate `lr` instead of the configured one if given.

        items: `{path, member, advantage}`, path of a group file. version: the tag of the present weights. ref_logprobs,
        old_logprobs: files of a reference rank's `logprobs` for the same items, where kl_coef > 0 or old_logprobs =
        recompute ask for them; streamed: directories instead, into which it writes parts meanwhile. Returns the step's
        figures (see `_figures`), and `spans` of a streamed one. Raises: DataError, ValueError.
        """
        policy, optimizer, config = self._trainer()
        started = time.perf_counter()
        named: dict[Field, str | None] = {"reference": ref_logprobs, "old": old_logprobs}
        given: dict[Field, Path] = {name: Path(path) for name, path in named.items() if path}
        whole_files = {} if streamed else given
        data = load_step(
            items,
            config.algorithm.aggregation,
            old_logprobs=whole_files.get("old"),
            reference_logprobs=whole_files.get("reference"),
        )
        _need_tokens(data)
        loaded = time.perf_counter()
        own, shape = self._world.own_part(data), self._shape(config.rollout.temperature)
        parts = Parts(given, self._world.rank, config.trainer.inflight) if streamed and given else None
        sums = accumulate_policy(policy, own, config.algorithm, shape, version, parts)
        learned = self._finish(optimizer, data, sums, started, loaded, lr)
        return learned if parts is None else learned | {"spans": tuple(parts.spans)}

    def supervised(self, paths: tuple[str, ...], lr: float | None = None) -> dict[str, Any]:
        """One optimiser step on the action tokens of every trajectory in these group files (gold), at temperature 1.

        lr: instead of the configured one. Returns figures as `train`; `loss` is the aggregated negative log-likelihood.
        """
        policy, optimizer, config = self._trainer()
        started = time.perf_counter()
        data = load_step(tuple({"path": p} for p in paths), config.algorithm.aggregation)
        _need_tokens(data)
        loaded = time.perf_counter()
        sums = accumulate_supervised(policy, self._world.own_part(data), self._shape(1.0))
        return self._finish(optimizer, data, sums, started, loaded, lr)

    def cold_start(self, paths: tuple[str, ...], steps: int, batch: int, lr: float) -> dict[str, Any]:
        """`steps` supervised steps over the files of gold, each epoch in a new seeded order; then a fresh optimiser.

        Returns `{steps, loss_start, loss_end, refused_steps, loss_tokens, tokens, seconds}` (losses of single steps).
        """
        policy, _, config = self._trainer()
        started = time.perf_counter()
        order = np.random.default_rng(config.run.seed)
        queue: list[str] = []
        history: list[dict[str, Any]] = []
        for _ in range(steps):
            while len(queue) < min(batch, len(paths)):
                queue += [p for p in order.permutation(np.array(sorted(paths))).tolist() if p not in queue]
            taken, queue = queue[:batch], queue[batch:]
            history.append(self.supervised(tuple(taken), lr))
        self._optimizer = Optimizer(policy, config.trainer, self._world)  # RL inherits neither moments nor step count
        if policy.adapter is not None:
            policy.adapter.mark_start()
        return {
            "steps": len(history),
            "loss_start": history[0]["loss"] if history else None,
            "loss_end": history[-1]["loss"] if history else None,
            "refused_steps": self.refused,
            "loss_tokens": sum(h["loss_tokens"] for h in history),
            "tokens": sum(h["tokens"] for h in history),
            "seconds": time.perf_counter() - started,
        }

    def logprobs(
        self,
        items: tuple[dict[str, Any], ...],
        out: str,
        version: int | None = None,
        reference: bool = False,
        streamed: bool = False,
    ) -> dict[str, Any]:
        """Write the log-probs of the items' action tokens to the file `out`, under the present weights.

        items: `{path, member}`. version: pull these weights first, if they are not the present ones. reference: by the
        KL reference instead, which some trainers have or load (see `_reference`). streamed: by micro-batch into the
        directory `out`, as the trainer's ranks will ask for them. Temperature: the rollout's.
        Returns `{loss_tokens, tokens, seconds, swap_s, version, spans}`.
        """
        policy, config = self._ready()
        started = time.perf_counter()
        if version is not None and version != self.version:
            self.pull(version)
        data = load_step(items, config.algorithm.aggregation)
        spans: list[Span] = []
        swapped = self._frozen.swap_s
        if streamed:
            spans = self._stream(policy, data, Path(out))
        else:
            with self._reference() if reference else contextlib.nullcontext(policy) as judge:
                arrays = self._logprobs(judge, data, config.rollout.temperature)
            if self._world.rank == 0:
                write_logprobs(Path(out), self.version, data.sequences, arrays)
        return {
            "loss_tokens": data.loss_tokens,
            "tokens": data.tokens,
            "seconds": time.perf_counter() - started,
            "swap_s": self._frozen.swap_s - swapped,
            "version": self.version,
            "spans": tuple(spans),
        }

    def _stream(self, policy: Policy, data: StepData, out: Path) -> list[Span]:
        """Every trainer rank's first micro-batch, then every rank's second, ...; each a file of its own."""
        assert self._config is not None
        trainer, spans = self._config.trainer, list[Span]()
        shape = self._shape(self._config.rollout.temperature)
        lockstep = trainer.sharding == "fsdp"
        ranks = [
            stream_logprobs(policy, part_of(data, rank, trainer.ranks), shape, lockstep=lockstep)
            for rank in range(trainer.ranks)
        ]
        for number in itertools.count():
            some = False
            for rank, batches in enumerate(ranks):
                begun = time.time()
                if (made := next(batches, None)) is not None:
                    write_logprobs(part_file(out, rank, number), self.version, *made)
                    spans.append(("reference", rank, number, begun, time.time()))
                    some = True
            if not some:
                break
        return spans

    def kl(self, items: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        """How far what sampled each trajectory stands from the KL reference, for a reward that pays for it.

        items: `{path, member}`. Returns `{kl}`: rows (visit, member, sum over its action tokens of the estimator
        `algorithm.kl_estimator` of KL(pi_rollout || reference), each within +-10 nats), and `kl_tokens`.
        """
        _, config = self._ready()
        data = load_step(items, config.algorithm.aggregation)
        with self._reference() as judge:
            arrays = self._logprobs(judge, data, config.rollout.temperature)
        totals: defaultdict[tuple[int, int], float] = defaultdict(float)
        for row, logprobs in zip(data.sequences, arrays, strict=True):
            terms = estimate(torch.from_numpy(logprobs), torch.from_numpy(row.rollout), config.algorithm.kl_estimator)
            totals[row.key[1:3]] += float(terms.clamp(-MAX_KL, MAX_KL).double().sum())
        return {"kl": [(*key, total) for key, total in sorted(totals.items())], "kl_tokens": data.loss_tokens}

    def publish(self, version: int) -> dict[str, Any]:
        """Put the present weights into the store as `version`, with a canary. Returns `{version, seconds}`.

        Raises: NotFinite.
        """
        policy, config = self._ready()
        started = time.perf_counter()
        self._check_weights(policy, version_step(version))
        if self._leads:
            ids = np.random.default_rng(0).integers(0, policy.vocab_size, _CANARY_TOKENS).astype(np.int32)
            canary = Canary(tuple(ids.tolist()), tuple(policy.score(ids).tolist()))
            if config.trainer.param_dtype == "bfloat16":
                canary = replace(canary, tolerance=_BFLOAT16_TOLERANCE)
            self._put(policy, version, canary)
        self.version = version
        return {"version": version, "seconds": time.perf_counter() - started}

    def _put(self, policy: Policy, version: int, canary: Canary) -> None:
        """Into the store: the weights, or an adapter alone beside its base, which is there once. Rank 0 writes."""
        store, adapter = self._weights(), policy.adapter
        writes, base, scale = self._world.rank == 0, None, 1.0
        tensors = policy.tensors() if adapter is None else adapter.tensors()
        if adapter is not None:
            base, scale = adapter.base[:16], adapter.scale
            if not self._writers.exchange(store.has_base(base))[0]:
                frozen = adapter.frozen(policy.model)
                store.publish_base(base, frozen) if writes else store.send(frozen)
        store.publish(version, tensors, canary, base=base, scale=scale) if writes else store.send(tensors)

    def pull(self, version: int) -> dict[str, Any]:
        """Take the weights of `version` from the store (a reference or a proximal policy). Returns `{version}`."""
        policy, _ = self._ready()
        policy.load_tensors(self._weights().load(version))
        self.version = version
        return {"version": version}

    def save(self, path: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write a checkpoint directory, whole or not at all. extra: JSON of the caller, returned by `init`.

        Returns `{path, bytes, seconds}`. Raises: NotFinite.
        """
        policy, optimizer, _ = self._trainer()
        started = time.perf_counter()
        self._check_weights(policy, (extra or {}).get("step", optimizer.steps))
        own: dict[str, Any] = {"optimizer": optimizer.state(), "rng": torch.get_rng_state()}
        state: dict[str, Any] = {"steps": optimizer.steps, "version": self.version}
        with self._directory(Path(path)) as scratch:
            if scratch is None:
                return {}
            if (adapter := policy.adapter) is None:
                _write_model(policy, scratch, self._writers)
            else:
                adapter.save(scratch, policy.directory, self._writers)
                own["start"], state["base"] = {n: whole(t) for n, t in adapter.start.items()}, adapter.base
            write_tensors(scratch / files.MOMENTS, optimizer.moments(), self._writers)
            if self._world.rank == 0:
                files.copy_tokenizer(policy.directory, scratch)
                torch.save(own, scratch / files.OPTIMIZER)
                (scratch / files.STATE).write_text(json.dumps(state, indent=1))
                (scratch / files.EXTRA).write_text(json.dumps(extra or {}, indent=1))
        size = sum(p.stat().st_size for p in Path(path).iterdir()) if self._world.rank == 0 else 0
        return {"path": path, "bytes": size, "seconds": time.perf_counter() - started}

    def forget(self, paths: tuple[str, ...]) -> None:
        """Remove these checkpoint directories, off the driver's loop. One that is gone already is no error."""
        for path in paths if self._world.rank == 0 else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def export(self, path: str) -> dict[str, Any]:
        """Write a plain Hugging Face directory, float32, that transformers loads with equal log-probs."""
        policy, _ = self._ready()
        with self._directory(Path(path)) as scratch:
            if scratch is not None:
                _write_model(policy, scratch, self._writers)
        return {"path": path}

    def _finish(
        self, optimizer: Optimizer, data: StepData, sums: Sums, started: float, loaded: float, lr: float | None
    ) -> dict[str, Any]:
        with timed(sums, "wait_s"):  # for the slowest rank
            merge(sums, self._world.exchange(sums.to_wire()))
        with timed(sums, "reduce_s"):
            if not self._sharded:  # FSDP has
                self._world.sum_gradients(optimizer.parameters)
        with timed(sums, "optimizer_s"):
            result = optimizer.apply(sums.loss, data.denominator, lr)
        self.refused += result.refused is not None
        sums.seconds.update({"load_s": loaded - started, "total_s": time.perf_counter() - started})
        return _figures(data, sums, result, optimizer.steps, self.refused)

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        assert self._optimizer is not None and self._policy is not None
        saved = torch.load(path / files.OPTIMIZER, map_location="cpu", weights_only=True)  # not all on rank 0's GPU
        if (adapter := self._policy.adapter) is not None:
            adapter.restore(path, state["base"])
            adapter.mark_start(saved["start"])
        try:
            self._optimizer.load(saved["optimizer"], TensorFile(path / files.MOMENTS))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        torch.set_rng_state(saved["rng"])

    def _logprobs(self, policy: Policy, data: StepData, temperature: float) -> list[np.ndarray]:
        """Of every segment's action tokens, float32 [A] each: every rank computes its part, and has all."""
        own = self._world.own_part(data)
        return self._world.in_order(data, own, compute_logprobs(policy, own, self._shape(temperature)))

    def _check_weights(self, policy: Policy, step: int) -> None:
        """Raises: NotFinite; RuntimeError where the ranks' copies of the weights have come apart."""
        tensors = {name: local(p.detach()) for name, p in policy.model.named_parameters()}
        bad = [i for i, tensor in enumerate(tensors.values()) if not torch.isfinite(tensor).all()][:1]
        if bad := [i for part in self._world.exchange(bad) for i in part]:
            remedy = (
                "lower trainer.lr and resume from the checkpoint before (trainer.grad_norm and trainer.ratio_max in "
                "metrics.jsonl show where it began)"
                if step
                else "the model of model.path is damaged, or trainer.cold_start.lr is too high"
            )
            name = list(tensors)[min(bad)]
            raise files.NotFinite(f"after step {step} the weights are not finite, the first in {name}: {remedy}")
        if self._world.size > 1 and not self._sharded:
            sums = self._world.exchange([float(p.sum(dtype=torch.float64)) for p in policy.parameters()])
            for name, values in zip(policy.trained(), zip(*sums, strict=True), strict=True):
                if len(set(values)) > 1:
                    raise RuntimeError(
                        f"the trainer ranks' copies of {name} differ (sums {values}): their processors or libraries "
                        "are not alike; resume from the last checkpoint on machines of one kind"
                    )

    @contextlib.contextmanager
    def _directory(self, path: Path) -> Iterator[Path | None]:
        """`new_directory` for those who write: rank 0, or all where weights are sharded. None for the others."""
        if not self._leads:
            yield None
            return
        with contextlib.ExitStack() as held:
            scratch = held.enter_context(files.new_directory(path)) if self._world.rank == 0 else None
            yield Path(self._writers.exchange(str(scratch))[0])
            self._writers.exchange(None)  # all have written

    @property
    def _sharded(self) -> bool:
        return self._policy is not None and self._policy.lockstep

    @property
    def _leads(self) -> bool:
        """Does this rank hold weights that no other rank can write?"""
        return self._sharded or self._world.rank == 0

    @property
    def _writers(self) -> Collective:
        """Those who write files of weights together."""
        return self._world if self._sharded else Collective()

    @contextlib.contextmanager
    def _reference(self) -> Iterator[Policy]:
        """The KL reference: a trainer's policy with its adapter as the run began; weights that a trainer loads; or what
        this rank holds."""
        policy, config = self._ready()
        with contextlib.ExitStack() as held:
            if policy.adapter is not None and config.reference.path is None:
                held.enter_context(policy.adapter.at_start())
            elif self._optimizer is not None and self._frozen.path is not None:
                keep = config.reference.pipeline == "resident"
                policy = held.enter_context(self._frozen.held(str(policy.device), keep=keep))
            yield policy

    def _weights(self) -> WeightStore:
        if self._store is None:
            raise ValueError("this rank was given no weight store; pass `store` to init")
        return self._store

    def _shape(self, temperature: float) -> Shape:
        assert self._config is not None
        return Shape(self._config.trainer.micro_tokens, self._config.trainer.logit_chunk, temperature, self._pace)

    def _ready(self) -> tuple[Policy, Config]:
        if self._policy is None or self._config is None:
            raise ValueError("this rank holds no policy yet; call init first")
        return self._policy, self._config

    def _trainer(self) -> tuple[Policy, Optimizer, Config]:
        policy, config = self._ready()
        if self._optimizer is None:
            raise ValueError("this rank is a reference; only a trainer rank trains and saves")
        return policy, self._optimizer, config


def export_merged(checkpoint: Path, target: Path, base: Path | None = None) -> None:
    """Write the whole model that a checkpoint's adapter makes of its base (where it was, or `base`).

    Raises: CheckpointError, ModelError.
    """
    state, _ = files.read_state(checkpoint)
    config, place = read_adapter(checkpoint)
    policy = load_policy(base or place)
    policy.adapt(config, 0).restore(checkpoint, state["base"])
    with files.new_directory(target) as scratch:
        _write_model(policy, scratch, Collective())


def _write_model(policy: Policy, directory: Path, writers: Collective) -> None:
    """The whole model, as transformers reads it; an adapter's updates are merged."""
    if policy.lockstep:
        write_tensors(directory / "model.safetensors", policy.tensors(), writers)
        if writers.rank:
            return
        policy.model.config.save_pretrained(directory)
    else:
        policy.model.save_pretrained(directory, state_dict=policy.tensors() if policy.adapter else None)
    files.copy_tokenizer(policy.directory, directory)


def _need_tokens(data: StepData) -> None:
    if data.loss_tokens == 0:
        raise DataError("none of these trajectories has an action token; there is nothing to train")


def _figures(data: StepData, sums: Sums, result: StepResult, steps: int, refused: int) -> dict[str, Any]:
    """A step's figures: counts, means over action tokens, maxima, and seconds by part.

    Counts, means and maxima are of all ranks, seconds of this one. tokens: of all segments; computed_tokens: of their
    prefix trees; padded_tokens: of the rows attention saw.
    loss: loss sum / denominator. Means whose count is `loss_tokens`: ratio, clipped (a share), kl_behaviour, entropy,
    lag, and where computed weight, kl_reference, kl_clamped, nll. gap_mean and gap_max: |log-prob of the trainer - of
    the engine| over the `gap_tokens` sampled with the very weights trained, None where there are none. refused: why
    the step was not taken ("loss", "gradient") or None, refused_tensor where; refused_steps counts them.
    """
    totals, maxima = dict(sums.totals), dict(sums.maxima)
    gap, gap_tokens = totals.pop("gap", 0.0), int(totals.pop("gap_tokens", 0))
    return {
        "loss": sums.loss / data.denominator,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "refused": result.refused,
        "refused_tensor": result.refused_tensor,
        "refused_steps": refused,
        "steps": steps,
        "denominator": data.denominator,
        "trajectories": data.trajectories,
        "segments": len(data.sequences),
        "loss_tokens": data.loss_tokens,
        "tokens": data.tokens,
        "computed_tokens": sums.computed_tokens,
        "padded_tokens": sums.padded_tokens,
        "micro_batches": sums.micro_batches,
        **{name: float(total) / data.loss_tokens for name, total in totals.items()},
        "gap_mean": gap / gap_tokens if gap_tokens else None,
        "gap_max": maxima.pop("gap_max", None),
        "gap_tokens": gap_tokens,
        **maxima,
        "seconds": {name: float(value) for name, value in sums.seconds.items()},
    }
