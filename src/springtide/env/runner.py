"""`EpisodeRunner`: plays one environment, in this process, by the rules every environment shares.

Owns: turn rules, deadlines, judging and closing of one episode. Invariants: every call of a turn is answered, in order,
and a call that does not fit its schema never reaches the environment; a text that no context holds is never tokenised:
it fails the start, or ends the episode as context_limit; only a deadline inside start, act, settle or score can expire;
what an environment raises becomes an environment error with a cause, never a reward; `act` and `finish` have their
effect once, however often they are asked; the environment's `close` runs exactly once.
Called by: environment workers (`env.local`), `InProcessClient` (tests, scripts), the checker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import numbers
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from springtide.env.environment import Environment
from springtide.env.guard import HungCall, authored, guarded
from springtide.env.outcome import checked
from springtide.env.session import EnvironmentUnavailable, FinishReason, Observation
from springtide.env.tools import BadArguments, ToolError
from springtide.trace import Cause, Check, Limits, Message, Outcome, Status, ToolCall, as_reward
from springtide.wire import pack

log = logging.getLogger(__name__)
T = TypeVar("T")
Note = Callable[[str, float | None], None]
"""Told what of the author's code is about to run, and for how many seconds at most (None: it has returned)."""

# Characters of an opening and of what one turn is answered. More fits no context, and to see that by its tokens alone
# would stop a rollout worker, with every episode in it, for a minute.
_OPENING, _ANSWERS = 4_000_000, 1_000_000
_KEPT = 2000  # characters of an answer beyond that which the record of the episode keeps
_REJECTED_IN_A_ROW = 3  # DESIGN: the third rejected turn in a row ends the episode as invalid_action
_FINISH: dict[FinishReason, Status] = {
    "done": "completed",
    "turn_limit": "turn_limit",
    "context_limit": "context_limit",
    "time_limit": "time_limit",
    "cancelled": "cancelled",
}


class EpisodeRunner:
    """A `Session` over one environment instance. Make it with `EpisodeRunner.open`.

    `hung` turns true when the environment's code is still running after its deadline (a thread cannot be stopped):
    the process that holds it should be replaced.
    """

    def __init__(self, environment: Environment, session_id: str, note: Note | None = None) -> None:
        self.id, self._note = session_id, note
        self.messages: tuple[Message, ...] = ()
        self.tools: tuple[dict[str, Any], ...] = ()
        self.environment = environment
        self.limits: Limits = environment.task.limits or type(environment).limits
        self.max_turns = self.limits.max_turns
        self.hung = False
        self._offered: dict[str, Any] = {}
        self._turns = 0
        self._rejected_turns = 0
        self._status: Status | None = None  # set once: how the episode ended
        self._error: Outcome | None = None
        self._acts: dict[int, asyncio.Task[Observation]] = {}
        self._finish: asyncio.Task[Outcome] | None = None
        self._lock = asyncio.Lock()  # one thing at a time happens to an environment
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, *, session_id: str = "", note: Note | None = None) -> EpisodeRunner:
        """Start the environment. Raises: EnvironmentUnavailable(setup); RuntimeError if it was used before."""
        environment._claim()
        runner = cls(environment, session_id or environment.task.id, note)
        try:
            await runner._start()
        except BaseException:
            await runner.close()
            raise
        return runner

    @property
    def ended(self) -> bool:
        return self._status is not None

    async def act(self, message: Message, request_id: int) -> Observation:
        """See `Session.act`. Never raises for what the environment does: such an episode ends, `finish` says why."""
        if request_id not in self._acts:
            self._refuse_if_closed()
            self._acts[request_id] = asyncio.create_task(self._play(message))
        return await self._await(self._acts[request_id])

    async def renew(self) -> None:
        """A runner has no lease; the worker that holds it does."""

    async def finish(self, reason: FinishReason) -> Outcome:
        """See `Session.finish`. `reason` counts only if the episode had not ended by itself."""
        if self._finish is None:
            self._refuse_if_closed()
            self._finish = asyncio.create_task(self._judge(reason))
        return await self._await(self._finish)

    async def gold(self) -> tuple[ToolCall, ...] | None:
        """See `Session.gold`. Raises: PermissionError outside `train`."""
        task = self.environment.task
        if task.split != "train":
            raise PermissionError(f"gold is answered on train tasks only; {task.id} is a {task.split} task")
        return await self.author_gold()

    async def author_gold(self) -> tuple[ToolCall, ...] | None:
        """Gold of any split, for the checker inside this process; no client can reach it."""
        async with self._lock:
            calls = await self._call("gold", self.environment.gold, self.limits.start_s)
        if calls is None:
            return None
        return tuple(ToolCall(f"gold_{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls))

    async def close(self) -> None:
        """Stop what runs and close the environment. Never raises; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        running = [task for task in (*self._acts.values(), self._finish) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            await self._call("close", self.environment.close, self.limits.settle_s)
        except Exception as error:  # whatever an author's close does, the session is gone
            log.warning("%s: close failed: %s", self.id, describe(error))

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EnvironmentUnavailable("infrastructure", f"{self.id} is closed")

    async def _await(self, task: asyncio.Task[T]) -> T:
        """Wait for `task`, which goes on when its caller leaves: a repeated request must find it, not redo it."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:  # it was not the caller that was cancelled
                raise EnvironmentUnavailable("infrastructure", f"{self.id} was closed meanwhile") from None
            raise

    # --- the episode -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            opening = await self._call("start", self.environment.start, self.limits.start_s)
            self.messages = _as_messages(opening, f"{type(self.environment).__name__}.start")
            if not self.messages:
                raise TypeError(f"{type(self.environment).__name__}.start returned no message")
            if (size := _size(self.messages)) > _OPENING:
                raise ValueError(
                    f"{type(self.environment).__name__}.start returned {size:,} characters; no context holds more than "
                    f"{_OPENING:,}"
                )
            with authored(f"{type(self.environment).__name__}.offered"):
                offered = list(self.environment.offered())
            for name in offered:
                if name not in self.environment.tools:
                    raise ValueError(f"offered() names {name!r}; the tools are {', '.join(self.environment.tools)}")
        except Exception as error:  # author's code: any failure is the environment's
            log.warning("%s: start failed: %s", self.id, _trace(error))
            raise EnvironmentUnavailable("setup", describe(error)) from error
        self._offered = {name: self.environment.tools[name] for name in offered}
        self.tools = tuple(tool.schema for tool in self._offered.values())

    async def _play(self, message: Message) -> Observation:
        async with self._lock:
            if self.ended:
                return Observation(tuple(_answer(call, _NOT_EXECUTED) for call in message.tool_calls), 0.0, True)
            started, earned = time.monotonic(), len(self.environment._rewards)
            self._turns += 1
            messages, executed = await self._turn(message)
            self._rejected_turns = 0 if executed else self._rejected_turns + 1
            if self._status is None:
                if self.environment._ended:
                    self._status = "completed"
                elif _size(messages) > _ANSWERS:
                    self._status = "context_limit"
                elif self._rejected_turns >= _REJECTED_IN_A_ROW:
                    self._status = "invalid_action"
                elif self._turns >= self.max_turns:
                    self._status = "turn_limit"
            if _size(messages) > _ANSWERS:  # the episode has ended: no policy reads them
                messages = [_cut(message) for message in messages]
            reward = math.fsum(check.value for check in self.environment._rewards[earned:])
            return Observation(tuple(messages), reward, self.ended, {"env_s": time.monotonic() - started})

    async def _turn(self, message: Message) -> tuple[list[Message], bool]:
        """Play one assistant message: the answers, and whether anything of it was executed."""
        if not message.tool_calls:
            return await self._reply(message.text)
        until = time.monotonic() + self.limits.act_s
        answers: list[Message] = []
        executed = False
        for call in message.tool_calls:
            if self.ended or self.environment._ended:
                answers.append(_answer(call, _NOT_EXECUTED))
                continue
            try:
                arguments = self._check(call)
            except BadArguments as rejection:
                answers.append(_answer(call, f"Error: {rejection}"))
                continue
            executed = True
            answers.append(_answer(call, await self._execute(call.name, arguments, until)))
        return answers, executed

    def _check(self, call: ToolCall) -> dict[str, Any]:
        if call.error is not None:
            raise BadArguments(call.error)
        if call.name not in self._offered:
            raise BadArguments(f"there is no tool {call.name!r:.60}; the tools are {', '.join(self._offered)}")
        return self._offered[call.name].arguments(call.arguments)

    async def _execute(self, name: str, arguments: dict[str, Any], until: float) -> str | tuple[dict[str, Any], ...]:
        method = getattr(self.environment, name)
        try:
            result = await self._call(name, lambda: method(**arguments), until - time.monotonic(), method)
            content = _as_content(result, f"{type(self.environment).__name__}.{name}")
        except ToolError as error:
            return str(error)
        except Exception as error:  # author's code: any failure is the environment's
            self._fail("tool", error)
            return "Error: the environment failed"
        if self._offered[name].final:
            self.environment.end(name)
        return content

    async def _reply(self, text: str) -> tuple[list[Message], bool]:
        kind = type(self.environment)
        if kind.reply is Environment.reply:
            if kind.plain_answer:
                self.environment.answer = text
                self.environment.end("answer")
                return [], True
            names = ", ".join(self._offered)
            return [Message("user", f"Call one of the tools: {names}.")], False
        try:
            result = await self._call("reply", lambda: self.environment.reply(text), self.limits.act_s, kind.reply)
            messages = [] if result is None else list(_as_messages(result, f"{kind.__name__}.reply"))
            if not messages and not self.environment._ended:
                raise TypeError(f"{kind.__name__}.reply returned nothing; return a text, or call self.end()")
        except Exception as error:  # author's code: any failure is the environment's
            self._fail("tool", error)
            return [], True
        return messages, True

    async def _judge(self, reason: FinishReason) -> Outcome:
        async with self._lock:
            if self._status is None:
                self._status = _FINISH[reason]
            if self._error is None and self._status != "cancelled":
                try:
                    await self._call("settle", self.environment.settle, self.limits.settle_s)
                except Exception as error:  # author's code: any failure is the environment's
                    self._fail("tool", error)
            if self._error is not None:
                return self._error
            if self._status == "cancelled":
                return Outcome("cancelled")
            try:
                return await self._score(self._status)
            except Exception as error:  # author's code: any failure is the environment's
                self._fail("judge", error)
                assert self._error is not None
                return self._error

    async def _score(self, status: Status) -> Outcome:
        environment = self.environment
        if environment.task.infeasible or environment._infeasible:
            # No state of the world is right here: what counts is whether the policy said so.
            right = environment.task.infeasible and environment._infeasible
            check = Check("infeasible", float(right), evidence=environment._end_reason)
            return Outcome(status, float(right), right, (check,))
        score = await self._call("score", environment.score, self.limits.score_s)
        name = type(environment).__name__
        if isinstance(score, Outcome):
            score = checked(score, f"{name}.score")
            if score.failed_environment:
                self._status, self._error = "environment_error", score
                return score
            return replace(score, status=status)
        if not isinstance(score, numbers.Real):
            raise TypeError(f"{name}.score returned {type(score).__name__}; return a float or an Outcome")
        reward = as_reward(score, f"{name}.score returned")
        return Outcome(status, reward, reward >= 1.0, tuple(environment._rewards))

    async def _call(
        self, name: str, function: Callable[[], Any], seconds: float, kind: Callable[..., Any] | None = None
    ) -> Any:
        """Run the author's `function` for at most `seconds`. Raises what it raises, and TimeoutError."""
        what = f"{type(self.environment).__name__}.{name}"
        if self._note is not None:
            self._note(f"in {what}, task {self.environment.task.id}", seconds)
        try:
            return await guarded(what, function, seconds, threaded=not asyncio.iscoroutinefunction(kind or function))
        except HungCall:
            self.hung = True
            raise
        finally:
            if self._note is not None:
                self._note(f"after {what}, task {self.environment.task.id}", None)

    def _fail(self, cause: Cause, error: Exception) -> None:
        log.warning("%s: environment error (%s): %s", self.id, cause, _trace(error))
        self._status = "environment_error"
        self._error = Outcome("environment_error", cause=cause, detail=describe(error))


_NOT_EXECUTED = "not executed: the episode has ended"


def _answer(call: ToolCall, content: str | tuple[dict[str, Any], ...]) -> Message:
    return Message("tool", content, tool_call_id=call.id, name=call.name)


def _size(messages: Sequence[Message]) -> int:
    return sum(len(message.text) for message in messages)


def _cut(message: Message) -> Message:
    """A message no context holds, as the record of the episode keeps it."""
    text = message.text
    if len(text) <= _KEPT:
        return message
    told = f"... (cut here: {len(text):,} characters, more than a context holds)"
    return replace(message, content=text[:_KEPT] + told)


def _as_content(value: Any, what: str) -> str | tuple[dict[str, Any], ...]:
    """A tool's result as message content. Raises: TypeError or ValueError that names the tool."""
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, str):
        value.encode()  # half a surrogate pair could not be sent
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(part, dict) and "type" in part for part in value):
        pack(value)
        if not all(isinstance(part.get("text", ""), str) for part in value):
            raise TypeError(f"{what} returned a content part whose text is not a str")
        return tuple(value)
    raise TypeError(f"{what} returned {type(value).__name__}; return a str, a dict, or a list of content parts")


def _as_messages(value: Any, what: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [Message("user", value)]
    if not isinstance(value, list | tuple) or not all(isinstance(message, Message) for message in value):
        raise TypeError(f"{what} returned {type(value).__name__}; return a str or a list of Message")
    for message in value:
        message.text.encode()
    return tuple(value)


_NOT_THE_AUTHORS = ("springtide/env/", "springtide/trace.py", "/asyncio/")


def describe(error: BaseException) -> str:
    """One line for an outcome: the error, and the line of the author's code it comes from."""
    text = str(error) if isinstance(error, HungCall | TimeoutError) else f"{type(error).__name__}: {error}"
    converted = error.__cause__ is not None and not isinstance(error.__cause__, Exception)  # see guard.authored
    frames = traceback.extract_tb((error.__cause__ if converted else error).__traceback__)  # type: ignore[union-attr]
    place = next((f for f in reversed(frames) if not any(part in f.filename for part in _NOT_THE_AUTHORS)), None)
    return " ".join(text.split())[:500] + (f" ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})" if place else "")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
