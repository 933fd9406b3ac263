"""Evaluation of a policy behind an OpenAI-compatible endpoint, over a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import springtide
from springtide.engine.openai import ChatEndpoint, EndpointError
from springtide.trace import Message

SUITE = f"{Path(__file__).parent / 'letters.py'}:Letters"


class Endpoint:
    """A chat endpoint that answers `reply`, after failing `failures` times with `status`."""

    def __init__(self, reply: dict[str, Any], *, failures: int = 0, status: int = 503) -> None:
        self.reply, self.failures, self.status = reply, failures, status
        self.failure, self.kind = "overloaded", "text/plain"
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if len(self.requests) <= self.failures:
            return web.Response(status=self.status, text=self.failure, content_type=self.kind)
        message = {"role": "assistant", **self.reply}
        usage = {"prompt_tokens": 11, "completion_tokens": 4}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        ready, port = threading.Event(), 0

        async def start() -> None:
            nonlocal port
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            ready.set()

        def run() -> None:
            loop.run_until_complete(start())
            loop.run_forever()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)
            loop.close()


def test_an_endpoint_is_evaluated_like_any_policy() -> None:
    endpoint = Endpoint({"content": "lettersa"})
    with endpoint.serve() as url:
        result = springtide.evaluate(url, SUITE, tasks=6, samples=2, temperature=0.5, max_new_tokens=9, model="m")
    figures = result.suites["letters"]
    assert (figures.episodes, figures.success, figures.env_errors) == (12, 1.0, 0)
    assert figures.tokens == 15
    sent = endpoint.requests[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0.5, 9)
    assert sent["messages"][0]["role"] == "user"
    assert len({r["seed"] for r in endpoint.requests}) == 12


def test_a_passing_fault_is_tried_again_and_a_final_one_is_an_environment_error() -> None:
    passing = Endpoint({"content": "lettersa"}, failures=2)
    with passing.serve() as url:
        assert springtide.evaluate(url, SUITE, tasks=1).suites["letters"].success == 1.0
    refused = Endpoint({"content": ""}, failures=10**6, status=400)
    with refused.serve() as url:
        figures = springtide.evaluate(url, SUITE, tasks=2).suites["letters"]
    assert (figures.episodes, figures.env_errors) == (0, 2)  # never a failure of the policy


def test_what_is_no_completion_is_said_with_the_servers_words() -> None:
    async def ask(url: str) -> None:
        async with ChatEndpoint(url, "m", tries=1) as endpoint:
            await endpoint.complete((Message("user", "hi"),), (), temperature=0.0, max_tokens=4, seed=1)

    with Endpoint({"content": "x"}, failures=9, status=401).serve() as url, pytest.raises(EndpointError, match="401"):
        asyncio.run(ask(url))
    torn = Endpoint({"content": "x"}, failures=9, status=200)
    torn.failure, torn.kind = '{"choices": [{"mess', "application/json"
    with torn.serve() as url, pytest.raises(EndpointError, match="JSONDecodeError"):
        asyncio.run(ask(url))
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9/v1/chat/completions"):
        asyncio.run(ask("http://127.0.0.1:9/v1"))
