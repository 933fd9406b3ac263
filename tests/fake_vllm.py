"""A stand-in for vLLM's HTTP routes, where the real server (half a minute to start) is not what a test is about.

It answers as vLLM 0.32 does, as far as `engine.vllm` asks, with whatever `Answers` says; the slow tests of
`test_vllm_server.py` hold the same engine to the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer


@dataclass
class Answers:
    """What it says, and what it was asked: `asked` holds (path, body, query) in order."""

    tokenizer: Tokenizer
    version: str = "0.32.0"
    rl_routes: bool = True
    text: str | None = None  # of a reply in text mode; None: what its ids decode to
    logprob: float = -1.0
    finish: str = "length"
    span: str | None = None  # the version that drew a turn; None: the one last taken
    update: tuple[int, str] = (200, "")
    canary: tuple[float, ...] = ()  # prompt log-probs
    checksums: dict[str, str] | None = None  # None: they change with each version
    slow: asyncio.Event | None = None  # turns wait for it
    label: str = "default"
    paused: bool = False
    updating: bool = False
    stuck: bool = False  # it answers no pause
    deaf: Callable[[], Awaitable[None]] | None = None  # it listens no more; what it has been asked goes on
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]


@contextlib.asynccontextmanager
async def fake_vllm(answers: Answers) -> AsyncIterator[str]:
    """Serve on a free port of loopback; its URL."""

    async def handle(request: web.Request) -> web.Response:
        path = request.path.lstrip("/")
        body = await request.json() if request.can_read_body else {}
        answers.asked.append((path, body, dict(request.query)))
        match path:
            case "health":
                return web.Response()
            case "version":
                return web.json_response({"version": answers.version})
            case "metrics":
                return web.Response(text='vllm:kv_cache_usage_perc{engine="0"} 0.25\n')
            case "tokenize":
                return web.json_response({"tokens": answers.tokenizer.encode(body["prompt"]).ids})
            case "init_weight_transfer_engine" if not answers.rl_routes:
                return web.json_response({"detail": "Not Found"}, status=404)
            case "weight_checker":
                return web.json_response({"checksums": answers.checksums or {"w": answers.label}})
            case "update_weights" if answers.update[0] != 200:
                answers.updating = False
                return web.json_response({"error": {"message": answers.update[1]}}, status=answers.update[0])
            case "pause" if answers.stuck:
                await asyncio.Event().wait()
            case "pause" | "resume":
                answers.paused = path == "pause"
            case "start_weight_update" | "finish_weight_update" if answers.updating == path.startswith("start"):
                return web.json_response({"error": {"message": f"no {path} now"}}, status=500)
            case "start_weight_update":
                answers.updating = True
            case "finish_weight_update":
                answers.updating, answers.label = False, body.get("weight_version", answers.label)
            case "inference/v1/generate":
                return await generate(body)
        return web.json_response({})

    async def generate(body: dict[str, Any]) -> web.Response:
        sampling = body["sampling_params"]
        if "prompt_logprobs" in sampling:
            rows = [{str(t): {"logprob": p}} for t, p in zip(body["token_ids"][1:], answers.canary, strict=False)]
            return web.json_response({"choices": [], "prompt_logprobs": [None, *rows]})
        while answers.paused:
            await asyncio.sleep(0.01)
        if answers.slow is not None and body.get("output_mode") is None:
            await answers.slow.wait()
        ids = [5] * sampling["max_tokens"]
        choice = {
            "token_ids": ids,
            "finish_reason": answers.finish,
            "logprobs": {"content": [{"token_id": t, "logprob": answers.logprob} for t in ids]},
            "weight_versions": [{"version": answers.span or answers.label, "start": 0, "end": len(ids)}],
            "text": answers.tokenizer.decode(ids) if answers.text is None else answers.text,
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        return web.json_response({"choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    answers.deaf = site.stop
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
