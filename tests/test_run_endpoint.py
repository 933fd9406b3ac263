"""Evaluation of a policy behind an OpenAI-compatible endpoint, over a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

import springtide
from springtide.cli.main import app
from springtide.config import ConfigError
from springtide.engine.openai import ChatEndpoint, EndpointError, check_url
from springtide.rollout.feeder import BrokenRun
from springtide.trace import Message

SUITE = f"{Path(__file__).parent / 'letters.py'}:Letters"


class Endpoint:
    """A chat endpoint that answers `reply`, after failing `failures` times with `status`."""

    def __init__(self, reply: dict[str, Any], *, failures: int = 0, status: int = 503) -> None:
        self.reply, self.failures, self.status = reply, failures, status
        self.failure, self.kind = "overloaded", "text/plain"
        self.headers: dict[str, str] = {}
        self.usage: Any = {"prompt_tokens": 11, "completion_tokens": 4}
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if len(self.requests) <= self.failures:
            return web.Response(status=self.status, text=self.failure, content_type=self.kind, headers=self.headers)
        message = {"role": "assistant", **self.reply}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": self.usage})

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
    assert figures.first_error.startswith(f"infrastructure: {url}/chat/completions (default): status 400: overloaded")


def test_a_server_that_names_its_pause_is_asked_again_after_it() -> None:
    async def ask(url: str) -> float:
        async with ChatEndpoint(url, "m") as endpoint:
            begun = time.monotonic()
            await endpoint.complete((Message("user", "hi"),), (), temperature=0.0, max_tokens=4, seed=1)
            return time.monotonic() - begun

    busy = Endpoint({"content": "x"}, failures=1, status=429)
    busy.headers = {"Retry-After": "2"}
    with busy.serve() as url:
        assert 2.0 <= asyncio.run(ask(url)) < 10.0  # 1.0 by itself


def test_a_budget_of_tokens_ends_an_evaluation_and_what_was_not_played_is_counted() -> None:
    endpoint = Endpoint({"content": "lettersa"})  # 15 tokens an episode of one turn
    with endpoint.serve() as url:
        result = springtide.evaluate(url, SUITE, tasks=6, concurrency=1, budget=40)
        figures = result.suites["letters"]
        assert (figures.episodes, figures.env_errors, len(endpoint.requests)) == (3, 3, 3)
        assert "the budget of 40 tokens is spent (45)" in figures.first_error
        with pytest.raises(ConfigError, match=r"^budget: must be a whole number of tokens"):
            springtide.evaluate(url, SUITE, tasks=1, budget=0)
    with pytest.raises(ConfigError, match=r"^budget: only an endpoint has one"):
        springtide.evaluate("springtide-nano", SUITE, tasks=1, budget=40)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}])
def test_a_budget_that_a_server_does_not_count_ends_the_evaluation_at_once(usage: Any) -> None:
    endpoint = Endpoint({"content": "lettersa"})
    endpoint.usage = usage

    async def ask(url: str, budget: int | None) -> int:
        async with ChatEndpoint(url, "m", budget=budget) as chat:
            return (
                await chat.complete([Message("user", "hi")], [], temperature=0, max_tokens=4, seed=1)
            ).completion_tokens

    async def twice(url: str) -> None:
        async with ChatEndpoint(url, "m", budget=40) as chat:
            for _ in range(2):
                with pytest.raises(EndpointError, match="does not say how many tokens"):
                    await chat.complete([Message("user", "hi")], [], temperature=0, max_tokens=4, seed=1)
            assert chat.exhausted

    with endpoint.serve() as url:
        assert asyncio.run(ask(url, None)) == 0
        asyncio.run(twice(url))
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("reply", "usage"),
    [
        ({"content": "a\ud83d"}, {}),
        ({"tool_calls": {"a": 1}}, {}),
        ({"content": "a"}, "many"),
        ({"content": "a"}, {"prompt_tokens": "x"}),
    ],
)
def test_a_reply_that_could_not_be_passed_on_is_an_error_of_the_endpoint(reply: dict[str, Any], usage: Any) -> None:
    endpoint = Endpoint(reply)
    endpoint.usage = usage

    async def ask(url: str) -> None:
        async with ChatEndpoint(url, "m") as chat:
            await chat.complete([Message("user", "hi")], [], temperature=0, max_tokens=4, seed=1)

    with endpoint.serve() as url, pytest.raises(EndpointError, match="the reply is no chat completion"):
        asyncio.run(ask(url))


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


def test_an_endpoint_that_nobody_serves_is_named_and_its_suite_is_not_suspected() -> None:
    """A wrong port was told as `every episode failed in its environment; try: springtide doctor env db`."""
    said = r"^http://127\.0\.0\.1:9/v1/chat/completions: ClientConnectorError: Cannot connect to host 127\.0\.0\.1:9 .*"
    with pytest.raises(EndpointError, match=said + "is the server up"):
        springtide.evaluate("http://127.0.0.1:9/v1", SUITE, tasks=2)


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///v1", "http://[::1", "http://h:99999/v1", "http://h:0/v1", "http://a b/v1", "https://:80", "h"],
)
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ValueError, match=r"^.* is not an endpoint's URL: .*; write it as http://HOST:PORT/v1$"):
        check_url(url)
    if url != "h":
        with pytest.raises(ConfigError, match="is not an endpoint's URL"):
            springtide.evaluate(url, SUITE, tasks=1)


def test_addresses_as_servers_print_them_are_taken() -> None:
    for url in ("http://127.0.0.1:8000/v1", "http://[::1]:8000/v1/chat/completions", "https://api.example.org/v1/"):
        check_url(url)


def test_when_every_episode_fails_the_command_says_whose_fault_it_is() -> None:
    refusing, fine = Endpoint({"content": ""}, failures=10**6, status=404), Endpoint({"content": "lettersa"})
    for endpoint, suite, says, doctor in (
        (refusing, SUITE, "status 404: overloaded", False),
        (fine, SUITE.replace("Letters", "Broken"), "judge: RuntimeError: the judge has no data", True),
    ):
        with endpoint.serve() as url:
            result = CliRunner().invoke(app, ["eval", url, "--suite", suite, "--level", "quick", "--tasks", "1"])
        assert isinstance(result.exception, BrokenRun)
        line = str(result.exception)
        assert says in line and ("springtide doctor env" in line) is doctor and "\n" not in line


def test_inside_an_event_loop_an_evaluation_runs_in_a_thread() -> None:
    async def inside(url: str) -> float:
        return (await asyncio.to_thread(springtide.evaluate, url, SUITE, tasks=1)).success

    with Endpoint({"content": "lettersa"}).serve() as url:
        assert asyncio.run(inside(url)) == 1.0
