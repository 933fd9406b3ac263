"""Any OpenAI-compatible chat endpoint: for evaluation and teachers, never for training (it gives text, not tokens).

Owns: the HTTP requests, their retries, their deadline and their budget. Invariants: a request is tried again only for
what may pass (connection, 408, 429, 5xx), with growing pauses (or the one that the server asks for) and at most `tries`
times; what the server refuses for good is an `EndpointError` with its own words; once the budget of tokens is spent,
or the server turns out not to count, nothing more is sent; an address that can be none is refused before that.
Called by: `springtide.api.evaluate`, `rollout.endpoint`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from springtide.trace import Message
from springtide.wire import WireError, pack

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_PROBE_S, _TIMEOUT_S = 15.0, 300.0  # for somebody to answer; for one completion
_LONGEST_PAUSE_S = 60.0


class EndpointError(Exception):
    """The endpoint could not be used. The text holds its address, the status and what it said."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion. `finish` is the server's finish_reason; token counts are its `usage`, 0 where it gives none."""

    message: Message
    finish: str
    prompt_tokens: int
    completion_tokens: int


def check_url(url: str) -> None:
    """Raises: ValueError, with one line, for what cannot be an endpoint's address."""
    wrong = ""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            wrong = "it names no host"
        elif parts.port == 0 or any(c.isspace() or not c.isprintable() for c in url):
            wrong = "no address holds port 0, blanks or control characters"
    except ValueError as error:  # a bracket that is not closed, a port beyond 65535
        wrong = str(error)
    if wrong:
        raise ValueError(f"{url!r:.200} is not an endpoint's URL: {wrong}; write it as http://HOST:PORT/v1")


class ChatEndpoint:
    """`async with ChatEndpoint(url, model)`. `url` ends in /v1 or in /chat/completions; the key is $OPENAI_API_KEY."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        connections: int = 64,
        tries: int = 5,
        budget: int | None = None,
    ) -> None:
        """budget: tokens of prompts and completions, as the server counts them; requests in flight may pass it."""
        check_url(url)
        self._url = url if url.endswith("/chat/completions") else url.rstrip("/") + "/chat/completions"
        self._model, self._tries = model, tries
        self._connections = connections
        self._budget, self.spent = budget, 0
        self._uncounted = False  # the server gives no usage
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatEndpoint:
        key = os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),  # aiohttp's own default of 100 is a silent cap
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        assert self._session is not None
        await self._session.close()

    async def probe(self) -> None:
        """See once that somebody answers; whatever it answers will do. Raises: EndpointError."""
        assert self._session is not None
        url = self._url.removesuffix("/chat/completions") + "/models"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_PROBE_S)):
                pass
        except TimeoutError:
            raise EndpointError(f"{self._url}: no answer within {_PROBE_S:g} s; is the server up?") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EndpointError(f"{self._url}: {_said(error)}; is the server up, and the URL right?") from None

    @property
    def exhausted(self) -> bool:
        """Whether the budget is spent, or cannot be counted."""
        return self._uncounted or (self._budget is not None and self.spent >= self._budget)

    def _spend(self, tokens: int) -> None:
        """Raises: EndpointError where a budget would never be spent; nothing more is sent then."""
        self.spent += tokens
        if self._budget is not None and not tokens:
            self._uncounted = True
            raise EndpointError(self.over_budget())

    def over_budget(self) -> str:
        if self._uncounted:
            return f"{self._url} does not say how many tokens it used (`usage`), so no budget can hold; give none"
        return f"the budget of {self._budget:,} tokens is spent ({self.spent:,}); give a larger one"

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> Reply:
        """One completion. Raises: EndpointError."""
        assert self._session is not None
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [m.to_openai() for m in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed & 0x7FFFFFFF,
        }
        if tools:
            body["tools"] = list(tools)
        said, asked_s = "", None
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt) if asked_s is None else asked_s)
            if self.exhausted:
                raise EndpointError(self.over_budget())
            asked_s = None
            try:
                async with self._session.post(self._url, json=body) as response:
                    if response.status == 200:
                        reply = _reply(await response.json())
                        self._spend(reply.prompt_tokens + reply.completion_tokens)
                        return reply
                    said = f"status {response.status}: {(await response.text())[:300]}"
                    if response.status not in _PASSING:
                        break
                    asked_s = _pause(response.headers.get("Retry-After"))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: the body is no JSON
                said = _said(error)
        raise EndpointError(f"{self._url} ({self._model}): {said}")


def _pause(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None where it gives a date or nothing."""
    return min(float(header), _LONGEST_PAUSE_S) if header is not None and header.strip().isdigit() else None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _reply(data: Any) -> Reply:
    try:
        choice, usage = data["choices"][0], data.get("usage") or {}
        message = Message.from_openai({**choice["message"], "role": "assistant"})
        pack(message)  # half a surrogate pair could not be sent to the environment
        return Reply(
            message, choice.get("finish_reason") or "stop", _count(usage, "prompt"), _count(usage, "completion")
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError, WireError) as error:
        raise EndpointError(f"the reply is no chat completion ({error!r}): {str(data)[:300]}") from None


def _count(usage: dict[str, Any], of: str) -> int:
    return max(0, int(usage.get(f"{of}_tokens") or 0))
