"""The checks behind `springtide doctor model`: a model directory put through what a run will do with it.

Owns: what is tried and what counts as wrong. Invariants: everything is real (the model's own tokenizer and template,
the local engine, the trainer's forward and backward pass, a weight store in a temporary directory); a check that
cannot be made says so instead of passing; the model's files are read only. A model the local engine cannot run is
still checked as text.
Called by: `cli.doctor`, tests.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from springtide.chat import Chat, check_vocab, load_chat
from springtide.chat.drift import measure_drift
from springtide.chat.template import ChatError
from springtide.config import Algorithm, make_config
from springtide.engine.protocol import Engine, EngineError, Generation, Sampling
from springtide.env.check import Kind, Verdict
from springtide.env.inprocess import InProcessClient
from springtide.models.presets import ModelNotFound, check_weights, max_positions, vocab_size
from springtide.rollout.episode import EpisodeSpec, play
from springtide.trace import Message, ToolCall, sampling_seed

if TYPE_CHECKING:
    from springtide.engine.local.engine import LocalEngine
    from springtide.trainer.model import Policy

TOLERANCE = 1e-3  # nats between two computations of one log-prob in float32
_CONVERSATIONS, _TURNS = 40, 4
_PROMPTS, _NEW_TOKENS, _LONGEST = 6, 24, 512
_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
                "required": ["text"],
            },
        },
    }
    for name in ("look_up", "write_down")
)
_AWKWARD = (
    "plain", 'a "quoted" word', "two\nlines", "back\\slash", "naïve 東京 🚲", "<tool_call>", "}", "  spaces  ", "0",
)  # fmt: skip

Finding = tuple[Kind, str]


class ModelChecker:
    """Checks by name, to be run in order inside `async with`: later ones use what earlier ones opened."""

    def __init__(self, path: Path, suite: str | None, level: str | None, tool_format: str = "auto") -> None:
        self._path, self._suite, self._level, self._format = path, suite, level, tool_format
        self._chat: Chat | None = None
        self._engine: LocalEngine | None = None
        self._no_engine = "the files could not be read"
        self._policy: Policy | None = None
        self._samples: list[tuple[np.ndarray, Generation]] = []
        self._stack = contextlib.AsyncExitStack()
        self.checks: dict[str, Callable[[], Awaitable[Finding]]] = {
            "files": self._files,
            "template": self._template,
            "tool calls": self._tool_calls,
            "log-probs": self._logprobs,
            "seeds": self._seeds,
            "gradients": self._gradients,
            "weights": self._weights,
            "cache": self._cache,
            "gold": self._gold,
        }

    async def __aenter__(self) -> ModelChecker:
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-doctor-")))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, name: str) -> Verdict:
        """Make one check."""
        if name != "files" and self._chat is None:
            return Verdict(name, "skipped", "the tokenizer and the template did not load")
        try:
            kind, detail = await self.checks[name]()
        except ChatError as error:
            kind, detail = "failed", str(error)
        return Verdict(name, kind, " ".join(detail.split()))

    async def _files(self) -> Finding:
        try:
            self._chat = load_chat(self._path, self._format)
            check_vocab(self._chat, vocab_size(self._path))
            check_weights(self._path)
            await self._open()
        except (ChatError, ModelNotFound) as error:
            return "failed", str(error)
        engine = "the local engine runs it" if self._engine else f"the local engine does not run it: {self._no_engine}"
        format_ = type(self._chat.format).__name__
        return "ok" if self._engine else "warning", f"{self._chat.vocab_size} tokens, calls read by {format_}; {engine}"

    async def _open(self) -> None:
        """The trainer's policy and an engine with its weights as version 0, where the engine knows the model."""
        import torch
        from transformers.utils import logging as transformers_logging

        from springtide.engine.local.engine import EngineSettings, LocalEngine
        from springtide.models.decoder import UnsupportedModel
        from springtide.trainer.model import ModelError, load_policy

        torch.set_num_threads(1)
        transformers_logging.disable_progress_bar()
        try:
            self._policy = load_policy(self._path)
            store = self._directory / "weights"
            store.mkdir()
            engine = await self._stack.enter_async_context(
                LocalEngine.open(EngineSettings(str(self._path), str(store), kv_tokens=8192, max_batch=16))
            )
            engine.store.publish(0, self._policy.tensors())
            await engine.load(0)
            self._engine = engine
        except (ModelError, UnsupportedModel, EngineError) as error:
            self._no_engine = str(error)

    async def _template(self) -> Finding:
        """Appending, as a rollout does, against rendering from scratch (verl#6719)."""
        chat, rng = self._chat, random.Random(0)
        assert chat is not None
        restarted = tokens = 0
        for number in range(_CONVERSATIONS):
            conversation = chat.start([Message("user", f"Task {number}: {rng.choice(_AWKWARD)}")], _TOOLS)
            for _ in range(_TURNS):
                conversation.assistant(conversation.render_gold(Message("assistant", "", (_call(rng),))), "stop")
                restarted += not conversation.observe([Message("tool", rng.choice(_AWKWARD))])
                drift = measure_drift(conversation)
                if drift.kind == "text":
                    return "failed", f"the text appended differs from a rendering: {drift.ours!r}, {drift.theirs!r}"
                tokens += drift.kind == "tokens"
        turns = _CONVERSATIONS * _TURNS
        if restarted or tokens:
            return "warning", (
                f"of {turns} turns {restarted} began a new segment (the template rewrites the past) and {tokens} would "
                "be tokenised otherwise from scratch; training stays exact, each new segment costs a prefill"
            )
        return "ok", f"{turns} turns of {_CONVERSATIONS} conversations equal a rendering from scratch, token for token"

    async def _tool_calls(self) -> Finding:
        chat, rng = self._chat, random.Random(1)
        assert chat is not None
        for text in _AWKWARD:
            call = _call(rng, text)
            conversation = chat.start([Message("user", "Do it.")], _TOOLS)
            read = conversation.assistant(
                conversation.render_gold(Message("assistant", "", (call,))), "stop"
            ).tool_calls
            if len(read) != 1 or read[0].error or read[0].name != call.name:
                return "failed", f"a call with the text {text!r} is read back as {read}"
            if json.loads(read[0].arguments) != json.loads(call.arguments):
                return "failed", f"{call.arguments} is read back as {read[0].arguments}"
        return "ok", f"{len(_AWKWARD)} calls with awkward arguments are written and read back unchanged"

    async def _logprobs(self) -> Finding:
        """The engine's log-probs of what it samples against the trainer's (transformers') of the same tokens."""
        if self._engine is None or self._policy is None:
            return "skipped", self._no_engine
        for number in range(_PROMPTS):
            prompt = self._prompt(number)
            self._samples.append((prompt, await self._sample(f"sample-{number}", prompt, number)))
        gap = max(float(np.abs(g.logprobs - self._score(p, g)).max()) for p, g in self._samples)
        tokens = sum(len(g.ids) for _, g in self._samples)
        if not gap <= TOLERANCE:
            return "failed", f"engine and trainer differ by up to {gap:.2g} nats over {tokens} sampled tokens"
        return "ok", f"engine and trainer agree within {gap:.1g} nats over {tokens} sampled tokens"

    async def _seeds(self) -> Finding:
        if self._engine is None:
            return "skipped", self._no_engine
        prompt = self._prompt(0)
        members = [await self._sample(f"member-{m}", prompt, m) for m in range(8)]
        again = await self._sample("again", prompt, 0)
        if not np.array_equal(again.ids, members[0].ids):
            return "failed", "the same seed sampled something else"
        if np.abs(again.logprobs - members[0].logprobs).max() > TOLERANCE:
            return "failed", "the same seed gave other log-probs"
        different = len({g.ids.tobytes() for g in members})
        said = f"{different} of 8 members of a group sampled something of their own; the same seed repeats"
        return "ok" if different > 1 else "warning", said

    async def _gradients(self) -> Finding:
        """One step's gradient, whole and in the smallest micro-batches (trl#6024, ms-swift#10117)."""
        if self._policy is None or not self._samples:
            return "skipped", self._no_engine
        from springtide.trainer.data import Row, StepData
        from springtide.trainer.step import Shape, accumulate_policy

        rows = []
        for number, (prompt, g) in enumerate(self._samples):
            ids = np.concatenate((prompt, g.ids)).astype(np.int32)
            at = np.arange(len(prompt), len(ids))
            versions = np.zeros(len(at), np.int64)
            advantage = 1.0 if number % 2 else -0.5
            rows.append(Row(("doctor", 0, number, 0), ids, at, g.logprobs, versions, advantage, 1.0))
        count = sum(len(r.at) for r in rows)
        data = StepData(tuple(rows), count, len(rows), count, sum(len(r) for r in rows))
        found = []
        for shape in (Shape(1 << 20, 1 << 20, 1.0), Shape(1, 7, 1.0)):
            accumulate_policy(self._policy, data, Algorithm(), shape, version=0)
            found.append([p.grad for p in self._policy.parameters()])
            for p in self._policy.parameters():
                p.grad = None
        pairs = [(a, b) for a, b in zip(*found) if a is not None and b is not None]
        largest = max(float(a.abs().max()) for a, _ in pairs)
        gap = max(float((a - b).abs().max()) for a, b in pairs) / max(largest, 1e-12)
        if not gap <= TOLERANCE:
            return "failed", f"the gradient depends on micro-batching: by {gap:.2g} of its largest entry"
        return "ok", f"the gradient does not depend on micro-batching: within {gap:.1g} of its largest entry"

    async def _weights(self) -> Finding:
        """What is published is what is read, and one changed value is noticed."""
        if self._policy is None or self._engine is None:
            return "skipped", self._no_engine
        from springtide.weights.store import FingerprintMismatch

        store, tensors = self._engine.store, self._policy.tensors()
        read = store.load(0)
        if odd := [n for n, t in tensors.items() if n in read and not bool((read[n] == t.cpu()).all())]:
            return "failed", f"{odd[0]} was not read as it was published"
        name = next(n for n, t in tensors.items() if t.ndim == 2)
        changed = {n: t.clone() for n, t in read.items()}
        changed[name].view(-1)[0] += 0.5
        try:
            store.fingerprint(0).check({n: t for n, t in changed.items() if n in store.fingerprint(0).tensors})
        except FingerprintMismatch:
            return "ok", f"{len(tensors)} tensors are read as published; one changed value is noticed"
        return "failed", f"a changed value of {name} was not noticed by the fingerprint"

    async def _cache(self) -> Finding:
        """New weights must not answer from KV that the old ones computed (cache salt)."""
        if self._engine is None or self._policy is None or not self._samples:
            return "skipped", self._no_engine
        policy, own = self._policy, {n: t.clone() for n, t in self._policy.tensors().items()}
        prompt, first = self._samples[0]
        context = np.concatenate((prompt, first.ids, prompt[:4])).astype(np.int32)
        altered = {n: t * 1.1 if t.ndim == 2 and "embed" not in n else t for n, t in own.items()}
        self._engine.store.publish(1, altered)
        await self._engine.load(1)
        second = await self._sample("sample-0", context, 0, turn=1)  # the session of the first sample
        old = self._score(context, second)
        try:
            policy.load_tensors(altered)
            new = self._score(context, second)
        finally:
            policy.load_tensors(own)
        gap, apart = float(np.abs(second.logprobs - new).max()), float(np.abs(old - new).max())
        if apart < 10 * TOLERANCE:
            return "skipped", f"weights changed by a tenth move no log-prob by more than {apart:.1g} nats"
        if second.version != 1 or not gap <= TOLERANCE:
            return "failed", f"after new weights a turn of version {second.version} is {gap:.2g} nats away from them"
        return "ok", f"a turn after new weights is within {gap:.1g} nats of them and {apart:.1g} away from the old"

    async def _gold(self) -> Finding:
        """The environment's own solutions, said in this model's tokens and read back by its format."""
        if self._suite is None:
            return "skipped", "name an environment with --env to play its solutions in this model's tokens"
        chat = self._chat
        assert chat is not None
        async with InProcessClient([self._suite]) as client:
            suite = client.suite(self._suite)
            level = self._level or suite.levels[0]
            tasks = (await client.catalog(self._suite, "train", level))[:8]
            context = max_positions(self._path) or 4096
            tables = {"model": {"context": context}, "engine": {"kv_tokens": max(context, 65536)}}
            config = make_config({"suites": [{"use": self._suite, "level": level}], **tables})
            longest = played = 0
            for visit, task in enumerate(tasks):
                spec = EpisodeSpec.of(config, "gold", task, visit, 0, 0)
                trajectory = await play(spec, client, cast(Engine, None), chat)  # gold asks no engine
                outcome = trajectory.outcome
                if outcome.cause is not None and "gold" in outcome.detail:
                    return "skipped", f"{task.id}: {outcome.detail}"
                if not outcome.success:
                    how = f"{outcome.status}: {outcome.detail}"
                    return "failed", f"{task.id}: its solution scores {outcome.reward} ({how})"
                longest = max(longest, *(len(s.ids) for s in trajectory.segments))
                played += 1
        if not played:
            return "skipped", f"{self._suite} has no train tasks at level {level}"
        return "ok", f"{played} solutions of {self._suite}, level {level}, succeed; the longest takes {longest} tokens"

    # --- helpers ------------------------------------------------------------------------------------------------

    def _prompt(self, number: int) -> np.ndarray:
        assert self._chat is not None
        rng = random.Random(number)
        messages = [Message("user", f"{number}. " + " ".join(rng.choice(_AWKWARD) for _ in range(6)))]
        return self._chat.start(messages, _TOOLS).ids[-_LONGEST:]

    async def _sample(self, session: str, ids: np.ndarray, member: int, turn: int = 0) -> Generation:
        assert self._engine is not None and self._chat is not None
        seed = sampling_seed(0, "train", "doctor", 0, member, 0)
        return await self._engine.generate(session, ids, Sampling(seed, turn, _NEW_TOKENS, 1.0, self._chat.stop_ids))

    def _score(self, prompt: np.ndarray, generation: Generation) -> np.ndarray:
        """The trainer's log-probs of the generated tokens, float32 [T]."""
        assert self._policy is not None
        return self._policy.score(np.concatenate((prompt, generation.ids)))[len(prompt) - 1 :]


def _call(rng: random.Random, text: str | None = None) -> ToolCall:
    arguments = {"text": rng.choice(_AWKWARD) if text is None else text, "count": rng.randrange(100)}
    return ToolCall("", rng.choice(("look_up", "write_down")), json.dumps(arguments, ensure_ascii=False))
