"""Episodes of a policy behind a chat endpoint: the same sessions, the same outcomes, but text instead of tokens.

Owns: the agent loop for evaluation by URL. Invariants: as `rollout.episode`: a call cut by the token limit is never
executed; a failure of the environment or the endpoint is an environment error, never a failure of the policy.
Called by: `springtide.api.evaluate` when the policy is a URL.
"""

from __future__ import annotations

import time
from dataclasses import replace

from springtide.engine.openai import ChatEndpoint, EndpointError
from springtide.env.session import EnvClient, EnvironmentUnavailable, FinishReason
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.trace import Message


async def play_endpoint(spec: EpisodeSpec, env: EnvClient, endpoint: ChatEndpoint) -> EpisodeSummary:
    """Play one episode and say how it ended. `tokens` is what the server counted."""
    if endpoint.exhausted:
        return EpisodeSummary.lost(spec, endpoint.over_budget(), cause="infrastructure")
    try:
        session = await env.open(spec.task, spec.visit, spec.member, spec.retry, spec.open_s)
    except EnvironmentUnavailable as error:
        return EpisodeSummary.lost(spec, error.detail, cause=error.cause)
    try:
        messages: list[Message] = list(session.messages)
        limit = min(session.max_turns, spec.max_turns or session.max_turns)
        reason: FinishReason = "turn_limit"
        decode_s = env_s = 0.0
        generated = total = turns = cut = 0
        for number in range(limit):
            begun = time.monotonic()
            reply = await endpoint.complete(
                messages,
                session.tools,
                temperature=spec.temperature,
                max_tokens=spec.max_new_tokens,
                seed=spec.seed + number,
            )
            turns, generated = turns + 1, generated + reply.completion_tokens
            total = reply.prompt_tokens + reply.completion_tokens
            message = reply.message
            if reply.finish == "length":
                cut += 1
                calls = tuple(replace(c, error="the call was cut by the token limit") for c in message.tool_calls)
                message = replace(message, tool_calls=calls)
            acted = time.monotonic()
            observation = await session.act(message, number)
            decode_s, env_s = decode_s + acted - begun, env_s + time.monotonic() - acted
            messages += [message, *observation.messages]
            if observation.ended:
                reason = "done"
                break
        outcome = await session.finish(reason)
    except EnvironmentUnavailable as error:
        return EpisodeSummary.lost(spec, error.detail, cause=error.cause)
    except EndpointError as error:
        return EpisodeSummary.lost(spec, str(error), cause="infrastructure")
    finally:
        await session.close()
    return EpisodeSummary(
        visit=spec.visit,
        member=spec.member,
        retry=spec.retry,
        status=outcome.status,
        reward=outcome.reward,
        success=outcome.success,
        cause=outcome.cause,
        detail=outcome.detail,
        loss_tokens=generated,
        generated=generated,
        tokens=total,
        turns=turns,
        cut_turns=cut,
        stale_steps=(),
        birth=None,
        queue_s=0.0,
        decode_s=decode_s,
        env_s=env_s,
    )
