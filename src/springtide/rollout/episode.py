"""One episode: open its environment, let the policy act, and record exactly what happened.

Owns: the agent loop. Invariants: the ids the engine was given and the ids it sampled are the ids of the trajectory;
an environment that fails gives an outcome without a reward; the session is closed whatever happens; every wait is
inside a call that has a deadline.
Called by: the rollout worker (training and evaluation alike), and scripts that replay gold.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from springtide.chat import Chat, ChatError, ContentError
from springtide.config import Config
from springtide.engine.protocol import EVALUATION, Engine, EngineError, Generation, Sampling
from springtide.env.session import EnvClient, EnvironmentUnavailable, FinishReason, Session
from springtide.trace import Cause, Message, Outcome, Status, TaskRef, Trajectory, Turn, sampling_seed, version_step
from springtide.wire import ConnectionLost, DeadlineExceeded, record

Purpose = Literal["train", "eval", "gold"]


@record
@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """What the driver asks for. `version` None samples each turn with the newest weights; else it is pinned.

    `stale_version` and `stale_probability` are cross-policy sampling (AgentRL 3.2): each turn is drawn from the stale
    pool with that probability, decided by the episode's seed. `gold` follows the environment's solution instead.
    """

    task: TaskRef
    visit: int
    member: int
    retry: int
    purpose: Purpose
    run_seed: int
    temperature: float
    max_new_tokens: int
    context: int
    max_turns: int | None = None
    version: int | None = None
    stale_version: int | None = None
    stale_probability: float = 0.0
    open_s: float = 120.0

    @staticmethod
    def of(
        config: Config,
        purpose: Purpose,
        task: TaskRef,
        visit: int,
        member: int,
        retry: int,
        *,
        temperature: float | None = None,
        version: int | None = None,
        stale_version: int | None = None,
    ) -> EpisodeSpec:
        """An episode under `config`, at the rollout's temperature unless another is given."""
        rollout = config.rollout
        return EpisodeSpec(
            task=task,
            visit=visit,
            member=member,
            retry=retry,
            purpose=purpose,
            run_seed=config.run.seed,
            temperature=rollout.temperature if temperature is None else temperature,
            max_new_tokens=rollout.max_new_tokens,
            context=config.model.context,
            max_turns=rollout.max_turns,
            version=version,
            stale_version=stale_version,
            stale_probability=rollout.stale_probability if stale_version is not None else 0.0,
        )

    @property
    def key(self) -> str:
        return f"{self.purpose}/{self.visit}/{self.member}/{self.retry}"

    @property
    def seed(self) -> int:
        return sampling_seed(self.run_seed, self.purpose, self.task.id, self.visit, self.member, self.retry)


@record
@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What the driver needs to know of a trajectory; the tokens stay with the worker. Times in seconds.

    generated: every token an engine returned to this episode; `loss_tokens` of them are in the trajectory (none, where
    the environment was lost). cut_turns: turns that ended at the token limit. stale_steps: the optimiser step whose
    weights sampled each stale turn.
    """

    visit: int
    member: int
    retry: int
    status: Status
    reward: float | None
    success: bool | None
    cause: str | None
    detail: str
    loss_tokens: int
    generated: int
    tokens: int
    turns: int
    cut_turns: int
    stale_steps: tuple[int, ...]
    birth: int | None
    queue_s: float
    decode_s: float
    env_s: float

    @property
    def killed(self) -> bool:
        """Lost to a process that died (environment worker, engine, rollout worker): uses up no retry."""
        return self.cause == "worker_lost"

    @staticmethod
    def lost(spec: EpisodeSpec, detail: str, cause: Cause = "worker_lost") -> EpisodeSummary:
        """The summary of an episode without a trajectory (by default: its worker died with it)."""
        return summarise(_failed(spec, EnvironmentUnavailable(cause, detail)), generated=0)


class Boundary:
    """What hears of an episode's turns as they happen, and may hold it between two: nobody, here."""

    async def returned(self, context: int) -> None:
        """The environment is open, or a tool answered: `context` tokens. Returns when the next turn may begin."""

    def turn_ended(self, context: int) -> None:
        """A turn is sampled and its tool acts; `context` tokens up to its end."""


async def play(
    spec: EpisodeSpec, env: EnvClient, engine: Engine, chat: Chat, boundary: Boundary | None = None
) -> Trajectory:
    """Play one episode to its end. Never raises for what an environment or an engine does: the outcome says it."""
    try:
        session = await env.open(spec.task, spec.visit, spec.member, spec.retry, spec.open_s)
    except EnvironmentUnavailable as error:
        return _failed(spec, error)
    try:
        return await _play(spec, session, engine, chat, boundary or Boundary())
    except EnvironmentUnavailable as error:
        return _failed(spec, error)
    finally:
        if spec.purpose != "gold":
            await _release(engine, spec.key)  # first: a cancelled turn must not decode on while its environment closes
        await session.close()


async def _play(spec: EpisodeSpec, session: Session, engine: Engine, chat: Chat, boundary: Boundary) -> Trajectory:
    try:
        conversation = chat.start(session.messages, session.tools)
    except ContentError as error:  # what else a template refuses, it refuses for every task: that ends the run
        raise EnvironmentUnavailable("setup", str(error)) from error
    messages: list[Message] = list(session.messages)
    turns: list[Turn] = []
    coin = random.Random(spec.seed)
    gold = await _gold_messages(session) if spec.purpose == "gold" else None
    limit = min(session.max_turns, spec.max_turns or session.max_turns)
    reason: FinishReason = "turn_limit"
    for number in range(limit):
        room = spec.context - len(conversation.ids)
        if room < 2:  # one token and its stop
            reason = "context_limit"
            break
        await boundary.returned(len(conversation.ids))
        started = time.monotonic()
        policy: Literal["current", "stale", "gold"]
        if gold is not None:
            if number >= len(gold):
                reason = "done"
                break
            ids = conversation.render_gold(gold[number])
            generation, policy = Generation(ids, np.zeros(len(ids), np.float32), version=0, finish="stop"), "gold"
        else:
            policy = "stale" if coin.random() < spec.stale_probability and spec.stale_version is not None else "current"
            sampling = Sampling(
                seed=spec.seed,
                turn=number,
                max_new_tokens=min(spec.max_new_tokens, room),
                temperature=spec.temperature,
                stop_ids=chat.stop_ids,
            )
            asked = spec.stale_version if policy == "stale" else spec.version
            try:
                generation = await engine.generate(
                    f"{spec.key}/{policy}",
                    np.asarray(conversation.ids, np.int32),
                    sampling,
                    version=asked,
                    prefix=f"{spec.purpose}/{spec.visit}",
                    priority=EVALUATION if spec.purpose == "eval" else 0,
                )
            except ConnectionLost as error:
                raise EnvironmentUnavailable("worker_lost", f"engine lost: {error}") from error
            except (EngineError, DeadlineExceeded) as error:
                raise EnvironmentUnavailable("infrastructure", f"engine: {error}") from error
            if spec.purpose == "eval" and asked not in (None, generation.version):
                raise EnvironmentUnavailable("infrastructure", f"the engine no longer holds version {asked}")
            if generation.version != spec.stale_version:
                policy = "current"  # also a stale turn whose version was refreshed away meanwhile: the newest drew it
        message = conversation.assistant(generation.ids, generation.finish, generation.logprobs, generation.version)
        messages.append(message)
        boundary.turn_ended(len(conversation.ids))
        acted = time.monotonic()
        observation = await session.act(message, number)
        turns.append(
            replace(
                conversation.turns[-1],
                step_reward=observation.step_reward,
                policy=policy,
                queue_s=generation.queue_s,
                decode_s=max(0.0, acted - started - generation.queue_s - generation.paused_s),
                paused_s=generation.paused_s,
                env_s=time.monotonic() - acted,
            )
        )
        messages.extend(observation.messages)
        if observation.ended:
            reason = "done"
            break
        try:
            conversation.observe(observation.messages)
        except ChatError as error:  # an image for a text model, a role that its template lacks
            raise EnvironmentUnavailable("tool", str(error)) from error
    outcome = await session.finish(reason)
    return Trajectory(
        task=spec.task,
        visit=spec.visit,
        member=spec.member,
        retry=spec.retry,
        segments=conversation.segments(),
        turns=tuple(turns),
        messages=tuple(messages),
        outcome=outcome,
        header=_header(spec, chat),
    )


def summarise(trajectory: Trajectory, *, generated: int | None = None) -> EpisodeSummary:
    """The driver's view of a trajectory; `generated` counts what the engine returned, if more than it holds."""
    outcome, birth = trajectory.outcome, trajectory.oldest_version()
    stale = [t for t in trajectory.turns if t.policy == "stale" and t.end > t.start]
    return EpisodeSummary(
        visit=trajectory.visit,
        member=trajectory.member,
        retry=trajectory.retry,
        status=outcome.status,
        reward=outcome.reward,
        success=outcome.success,
        cause=outcome.cause,
        detail=outcome.detail,
        loss_tokens=trajectory.loss_tokens,
        generated=trajectory.loss_tokens if generated is None else generated,
        tokens=trajectory.tokens,
        turns=len(trajectory.turns),
        cut_turns=sum(t.finish == "length" for t in trajectory.turns),
        stale_steps=tuple(version_step(int(trajectory.segments[t.segment].versions[t.start])) for t in stale),
        birth=birth,
        queue_s=sum(t.queue_s for t in trajectory.turns),
        decode_s=sum(t.decode_s for t in trajectory.turns),
        env_s=sum(t.env_s for t in trajectory.turns),
    )


def _failed(spec: EpisodeSpec, error: EnvironmentUnavailable) -> Trajectory:
    cause: Any = error.cause
    return Trajectory(
        task=spec.task,
        visit=spec.visit,
        member=spec.member,
        retry=spec.retry,
        segments=(),
        turns=(),
        messages=(),
        outcome=Outcome("environment_error", cause=cause, detail=error.detail),
    )


def _header(spec: EpisodeSpec, chat: Chat) -> dict[str, Any]:
    return {
        **chat.fingerprints,
        "purpose": spec.purpose,
        "seed": spec.seed,
        "temperature": spec.temperature,
        "max_new_tokens": spec.max_new_tokens,
        "context": spec.context,
        "environment_version": spec.task.version,
    }


async def _gold_messages(session: Session) -> list[Message]:
    calls = await session.gold()
    if calls is None:
        raise EnvironmentUnavailable("setup", "the environment has no gold solution for this task")
    return [
        Message("assistant", tool_calls=(call,))
        if call.name
        else Message("assistant", json.loads(call.arguments)["text"])
        for call in calls
    ]


async def _release(engine: Engine, key: str) -> None:
    for policy in ("current", "stale"):
        try:
            await engine.release(f"{key}/{policy}")
        except (EngineError, ConnectionLost, DeadlineExceeded):
            return  # a lost engine holds nothing
