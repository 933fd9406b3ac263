"""The frozen policies beside the trainer: what their log-probs cost a step, and which way they take to it (RA2P).

Owns: the reference and the proximal policy of a run, from their weights to the trainer's step. Invariants: log-probs
pass through files in memory, never through the driver; however they come, the step is the same to the bit.
- `streaming`: each frozen rank writes them by micro-batch while the trainer's forward passes run (`trainer.parts`).
- `aggregate`, `resident`, an adapter: the trainer computes the reference's for the whole step, then trains.
Called by: the driver.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from springtide.config import Config
from springtide.process import task_group
from springtide.rundir import RunDirectory
from springtide.runtime.local import Runtime
from springtide.runtime.ranks import Rank
from springtide.schedule.events import Measured

STEP_S = 3600.0  # deadline of one optimiser step, a publication, a checkpoint


class Frozen:
    """The frozen policies of one incarnation."""

    def __init__(self, config: Config, runtime: Runtime, directory: RunDirectory) -> None:
        self._config, self._runtime, self._directory = config, runtime, directory
        self._files = runtime.weights / "logprobs"

    async def open(self) -> None:
        """Give the reference the weights of the run's start, and the proximal policy a model to pull into."""
        start, reference = self._directory.path / "start", self._runtime.reference
        needed = self._config.reference.path is None and not self._config.adapter_is_reference
        if reference is not None and needed and not start.exists():
            await self._runtime.trainer.call("export", deadline_s=STEP_S, path=str(start))
        for rank in (reference, self._runtime.proximal):
            if isinstance(rank, Rank):
                await rank.assume("reference", None, deadline_s=self._config.runtime.start_s)

    async def penalties(self, items: tuple[dict[str, Any], ...]) -> dict[tuple[int, int], float]:
        """(visit, member) -> kl_coef times the episode's KL to the reference, where the reward pays for it."""
        algorithm, reference = self._config.algorithm, self._runtime.reference
        if reference is None or algorithm.kl_in == "loss":
            return {}
        reply = await reference.call_again("kl", deadline_s=STEP_S, items=items)
        return {(visit, member): algorithm.kl_coef * kl for visit, member, kl in reply["kl"]}

    async def train(
        self, items: tuple[dict[str, Any], ...], version: int, lr: float, step: int
    ) -> tuple[dict[str, Any], list[Measured]]:
        """One optimiser step with all the log-probs that its loss needs; its figures, and what it cost.

        items: as `Rank.train`. version: of the present weights. Raises as the trainer's and the frozen ranks' calls.
        """
        trainer, reference = self._runtime.trainer, self._runtime.reference
        wanted: list[tuple[str, Any, dict[str, Any]]] = []
        if reference is not None and self._config.algorithm.kl_in == "loss":
            wanted.append(("ref_logprobs", reference, {"reference": True}))
        if self._runtime.proximal is not None:
            wanted.append(("old_logprobs", self._runtime.proximal, {"version": version}))
        out = {key: str(self._files / f"{step}-{key}") for key, _, _ in wanted}
        # A trainer that computes the reference's itself has to before it trains; then all come as whole files.
        at_once = all(rank is not trainer for _, rank, _ in wanted)
        shutil.rmtree(self._files, ignore_errors=True)
        for directory in (self._files, *(map(Path, out.values()) if at_once else ())):
            directory.mkdir(parents=True)
        replies: dict[str, dict[str, Any]] = {}

        async def ask(key: str, rank: Any, options: dict[str, Any]) -> None:
            replies[key] = await rank.call_again(
                "logprobs", deadline_s=STEP_S, items=items, out=out[key], streamed=at_once, **options
            )

        async with task_group() as tasks:  # one that fails ends the others' calls
            asked = [tasks.create_task(ask(*entry)) for entry in wanted]
            if not at_once:
                for task in asked:
                    await task
            learned = await trainer.call(
                "train", deadline_s=STEP_S, items=items, version=version, lr=lr, streamed=at_once and bool(out), **out
            )
        shutil.rmtree(self._files, ignore_errors=True)
        spans = [*learned.pop("spans", ()), *(span for reply in replies.values() for span in reply["spans"])]
        if spans:
            self._write(step, spans)
        return learned, self._measured(learned, replies)

    def _measured(self, learned: dict[str, Any], replies: dict[str, dict[str, Any]]) -> list[Measured]:
        """Seconds of a token, for policies that choose by them."""
        now, seconds, tokens = time.time(), learned["seconds"], max(1, learned["tokens"])
        found = [Measured(now, "train_token", (seconds["forward_s"] + seconds["backward_s"]) / tokens)]
        if (reply := replies.get("ref_logprobs")) is not None:
            busy = sum(end - begun for what, *_, begun, end in reply["spans"] if what == "reference")
            busy = busy or reply["seconds"] - reply["swap_s"]
            found.append(Measured(now, "reference_token", busy / max(1, reply["tokens"])))
            seconds["reference_s"] = busy
            if reply["swap_s"]:
                found.append(Measured(now, "swap", reply["swap_s"]))
                seconds["swap_s"] = reply["swap_s"]
        return found

    def _write(self, step: int, spans: list[tuple[str, int, int, float, float]]) -> None:
        names = ("what", "rank", "micro_batch", "from", "to")
        with (self._directory.path / "spans.jsonl").open("a") as file:
            for span in sorted(spans, key=lambda span: span[3]):
                file.write(json.dumps({"step": step, **dict(zip(names, span, strict=True))}) + "\n")
