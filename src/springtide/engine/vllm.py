"""vLLM as an engine: one server of its own environment behind the Engine protocol, with published weights pulled in.

Owns: what is asked of a server at the start, requests and replies, and the gate that keeps turns and updates apart.
Invariants: tokens in, tokens and the log-probs they were drawn with out, never text; every token of a turn comes from
one version, which is also the salt of its KV; no turn starts before the version was verified by its reader
(`engine.vllm_worker`) and answers the publisher's canary; a server that is gone ends this process, so that its
supervisor starts both again.
Called by: `process.start_process` with entry `springtide.engine.vllm:main`. Torch-free. vLLM holds one set of weights:
`weight_slots` does not apply, and stale turns go to a rank of their own. What it cannot do is in docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import aiohttp
import numpy as np

from springtide import wire
from springtide.chat import load_chat, undecodable
from springtide.config import ConfigError
from springtide.engine.clock import Clock
from springtide.engine.handler import EngineHandler
from springtide.engine.protocol import EngineError, EngineStats, Generation, Options, Sampling
from springtide.engine.vllm_server import Server, VllmSettings, check_version
from springtide.process import ProcessFailed, scratch_directory, task_group

MIN_TEMPERATURE = 0.01  # vLLM samples anything between 0 and this as if it were this
_POLL_S, _LAST_WORDS_S = 0.2, 10.0
_LOOK = aiohttp.ClientTimeout(5.0, sock_connect=2.0)  # whether it is up
_LOOK_EVERY_S, _LOOKS = 2.0, 3  # once it is up; failures in a row that mean its end
_REACH_S = 3.0  # for a given server to take a connection
_NOBODY = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # refused, no such host, no way to it
_BFLOAT16_TOLERANCE = 0.5  # of a canary against a publisher in float32, as in `engine.local`
_PROBE = 'Search: "wörld" = 12,345.6\n\t{"name": "x"} 你好 🙂  end'


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Serve until cancelled. args: `model`, `store`, `config` as `engine.server`, and the rank's `index`."""
    try:
        async with VllmEngine.open(VllmSettings.of(args)) as engine:
            handler = EngineHandler(engine)
            async with wire.serve(socket_path, handler.handle, on_disconnect=handler.disconnected):
                await asyncio.Event().wait()
    except (ConfigError, ProcessFailed) as error:
        print(f"springtide: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # so that this is the last line of the log, which the supervisor shows


Drawn = tuple[np.ndarray, np.ndarray, Literal["stop", "length"], int]  # ids, log-probs, finish, cached prompt tokens


# --- requests and replies ----------------------------------------------------------------------------------------


def turn_seed(seed: int, turn: int) -> int:
    """vLLM's seed of a turn, int63: one generator a request, so within a turn it follows the order of steps."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big") >> 1


def request_body(ids: np.ndarray, sampling: Sampling, version: int, priority: int) -> dict[str, Any]:
    """A turn as vLLM's token-in-token-out endpoint takes it. Every parameter that could change a draw is given."""
    return {
        "token_ids": ids.tolist(),
        "cache_salt": str(version),
        "priority": -priority,  # there, the lowest goes first
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": turn_seed(sampling.seed, sampling.turn),
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # only `stop_ids` end a turn
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            **_PLAIN,
        },
    }


_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def read_reply(reply: Mapping[str, Any], version: int) -> Drawn:
    """A turn's ids int32 [T], log-probs float32 [T], finish, and cached tokens of its prompt. Raises: EngineError."""
    try:
        (choice,) = reply["choices"]
        ids, content, finish = choice["token_ids"], choice["logprobs"]["content"], choice["finish_reason"]
        details = reply["usage"].get("prompt_tokens_details") or {}
        told = {span["version"] for span in choice.get("weight_versions") or ()}
        named, logprobs = [c["token_id"] for c in content], [c["logprob"] for c in content]
        cached = int(details.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's reply is no turn ({error!r}): {json.dumps(reply)[:300]}") from None
    if finish not in ("stop", "length"):
        raise EngineError(f"vLLM ended the turn with {finish!r}")
    if named != ids or not ids:
        raise EngineError(f"vLLM's log-probs are of the tokens {named[:8]}..., its reply is {ids[:8]}...")
    if not all(-9999.0 < p <= 0.0 for p in logprobs):  # its mark for what is no number
        raise EngineError(f"vLLM gave log-probs that are no numbers, for version {version}: {logprobs[:8]}")
    if told != {str(version)}:
        raise EngineError(f"vLLM says it sampled with the weights of version {sorted(told)}, not of {version}")
    return np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), finish, cached


# --- the engine --------------------------------------------------------------------------------------------------


class VllmEngine:
    """Implements `engine.protocol.Engine`. Use `async with VllmEngine.open(settings) as engine`."""

    def __init__(self, settings: VllmSettings, http: aiohttp.ClientSession, gone: asyncio.Event) -> None:
        self.settings, self._http, self._gone = settings, http, gone
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        self._version: int | None = None
        self._checksums: dict[str, str] = {}
        self._pinned: set[int] = set()
        self._open = asyncio.Event()  # turns may start
        self._paused = self._updating = False
        self._waiting: dict[str, object] = {}  # session -> its turn, which may not start yet
        self._turns: dict[str, asyncio.Task[Any]] = {}
        self._quiet = asyncio.Event()  # no turn runs
        self._seen: dict[str, int] = {}  # session -> tokens of it that were computed
        self._loading = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: VllmSettings) -> AsyncIterator[VllmEngine]:
        """Start the server, or find the one given, and see that it is what the run needs. Its end ends the block.

        Raises: ProcessFailed, ConfigError.
        """
        gone = asyncio.Event()  # the server does not answer any more
        async with contextlib.AsyncExitStack() as stack:
            path = stack.enter_context(scratch_directory())
            server: Server | None = None
            # Connections are not kept: uvicorn closes an idle one, and a turn sent into that moment would be lost.
            base, connector = settings.url, aiohttp.TCPConnector(limit=0, force_close=True)
            if base is None:
                await connector.close()
                base, socket = "http://vllm", f"{path}/s"
                server = await stack.enter_async_context(Server.start(settings, socket, path))
                connector = aiohttp.UnixConnector(path=socket, limit=0, force_close=True)  # type: ignore[assignment]
            key = os.environ.get("VLLM_API_KEY")
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    base_url=base.rstrip("/") + "/",
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(total=None),  # every call of ours has its caller's deadline
                    headers={"Authorization": f"Bearer {key}"} if key else {},
                )
            )
            engine = cls(settings, http, gone)
            async with task_group() as tasks:
                watcher = tasks.create_task(engine._watch(server))
                await engine._come_up()
                looker = tasks.create_task(engine._look())
                yield engine
                watcher.cancel()
                looker.cancel()

    async def _watch(self, server: Server | None) -> None:
        """Raises: ProcessFailed once the server is gone; one of ours that does not answer gets a moment to say why."""
        where = self.settings.url or "vLLM"
        if server is None:
            await self._gone.wait()
            raise ProcessFailed(f"the server at {where} does not answer any more")
        async with task_group() as tasks:
            ended = tasks.create_task(server.ended())
            gone = tasks.create_task(self._gone.wait())
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=_LAST_WORDS_S)
            gone.cancel()
            if not ended.done():
                ended.cancel()
                raise ProcessFailed(f"{where} does not answer any more{server.cause}")
        raise ProcessFailed(ended.result())

    async def _look(self) -> None:
        """Notice a server that listens no more although our calls hang: one whose core died waits for them to end."""
        failed = 0
        while failed < _LOOKS:
            await asyncio.sleep(_LOOK_EVERY_S)
            slow_or_well = not isinstance(await self._unwell(), aiohttp.ClientError)
            failed = 0 if slow_or_well else failed + 1
        self._gone.set()

    # --- turns ------------------------------------------------------------------------------------------------

    async def generate(
        self, session: str, ids: np.ndarray, sampling: Sampling, **options: Unpack[Options]
    ) -> Generation:
        """See `Engine.generate`. A turn of a version that is not held continues on the one that is."""
        version, forced_ids, priority = options.get("version"), options.get("forced_ids"), options.get("priority", 0)
        room = self.settings.config.model.context - len(ids)
        asked = sampling.max_new_tokens if forced_ids is None else len(forced_ids)
        if room < asked:
            raise EngineError(f"{len(ids)} prompt tokens and {asked} new ones are more than model.context")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(f"vLLM samples at no temperature between 0 and {MIN_TEMPERATURE}: {sampling.temperature}")
        begun, paused = time.monotonic(), self.clock.paused()
        held = await self._enter(session, version)
        if session in self._turns:
            raise EngineError(f"session {session} has a turn in flight")
        started, waited_paused = time.monotonic(), self.clock.paused() - paused
        request = asyncio.create_task(
            self._draw(session, ids, sampling, held, priority)
            if forced_ids is None
            else self._follow(ids, forced_ids, sampling)
        )
        self._turns[session] = request
        self._switch()
        try:
            out, logprobs, finish, cached = await request
        except asyncio.CancelledError:
            request.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineError(f"session {session} was released") from None
        finally:
            if self._turns.get(session) is request:
                del self._turns[session]
            self._switch()
        known = min(self._seen.get(session, 0), len(ids))
        self._seen[session] = len(ids) + len(out)
        recomputed = max(0, known - cached)
        self.counts.update(computed=len(ids) - cached, cached=cached, recomputed=recomputed)
        self.counts["forced" if forced_ids is not None else "generated"] += len(out)
        stood = self.clock.paused() - paused
        return Generation(
            ids=out,
            logprobs=logprobs,
            version=held,
            finish=finish,
            cached_tokens=cached,
            computed_tokens=len(ids) - cached,
            recomputed_tokens=recomputed,
            queue_s=max(0.0, started - begun - waited_paused),
            decode_s=max(0.0, time.monotonic() - started - (stood - waited_paused)),
            paused_s=stood,
        )

    async def generate_many(self, requests: tuple[dict[str, Any], ...]) -> tuple[Generation | str, ...]:
        """Run turns together; a refused one's result is the refusal's text. Not bit-reproducibly: vLLM batches."""
        results = await asyncio.gather(*(self.generate(**r) for r in requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result
        return tuple(str(r) if isinstance(r, EngineError) else r for r in results)  # type: ignore[misc]

    async def _enter(self, session: str, version: int | None) -> int:
        """Wait until turns may start; the version of this one. Raises: EngineError (the stale pool lacks it)."""
        turn = self._waiting[session] = object()
        try:
            while not self._open.is_set():
                await self._open.wait()
            if self._waiting.get(session) is not turn:
                raise EngineError(f"session {session} was released")
        finally:
            if self._waiting.get(session) is turn:
                del self._waiting[session]
        assert self._version is not None
        if self.settings.stale and version not in (None, self._version):
            raise EngineError(f"the stale pool no longer holds version {version}")
        return self._version

    async def _draw(self, session: str, ids: np.ndarray, sampling: Sampling, version: int, priority: int) -> Drawn:
        body = request_body(ids, sampling, version, priority)
        return read_reply(await self._post("inference/v1/generate", body, {"X-Session-ID": session}), version)

    async def _follow(self, ids: np.ndarray, forced: np.ndarray, sampling: Sampling) -> Drawn:
        if sampling.temperature not in (0.0, 1.0):
            raise EngineError("vLLM gives log-probs of a given continuation at temperature 1 only")
        logprobs = await self._score(np.concatenate([ids, forced]))
        stopped = len(forced) > 0 and int(forced[-1]) in sampling.stop_ids
        return np.asarray(forced, np.int32), logprobs[len(ids) - 1 :], "stop" if stopped else "length", 0

    async def _score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probs of each of `ids` (int [T]) after the first, at temperature 1."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False, **_PLAIN}
        body = {"token_ids": ids.tolist(), "sampling_params": sampling}
        told = (await self._post("inference/v1/generate", body))["prompt_logprobs"]
        rows = zip(ids[1:].tolist(), told[1:], strict=True)
        return np.asarray([row[str(token)]["logprob"] for token, row in rows], np.float32)

    async def release(self, session: str) -> None:
        self.forget(session)

    def forget(self, session: str) -> None:
        """`release`, for callers that cannot wait. vLLM frees KV by age; nothing else of the session is kept."""
        self._seen.pop(session, None)
        self._waiting.pop(session, None)
        if (turn := self._turns.get(session)) is not None:
            turn.cancel()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop. keep: running turns go on at `resume`. abort: every turn ends with an EngineError."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode {mode!r}; it is keep or abort")
        self._paused = True
        self._switch()
        await self._post("pause", params={"mode": mode})

    async def resume(self) -> None:
        await self._post("resume")
        self._paused = False
        self._switch()

    # --- weights ----------------------------------------------------------------------------------------------

    async def load(self, version: int) -> None:
        """See `Engine.load`: let running turns end, pull, verify, go on. A version that fails is never drawn from.

        Raises: EngineError.
        """
        async with self._loading:
            if version == self._version:
                return
            if self._version in self._pinned:
                raise EngineError(
                    f"version {self._version} is pinned, and vLLM holds one: drop it, then load {version}"
                )
            if self._paused:
                raise EngineError("the engine is paused, so no turn can end before the update; resume first")
            begun, published = time.monotonic(), self._published(version)
            self._updating = True
            self._switch()
            await self._quiet.wait()
            await self._post("pause", params={"mode": "wait"})
            await self._post("start_weight_update")
            await self._post("update_weights", {"update_info": {"version": version}})
            await self._post("finish_weight_update", {"weight_version": str(version)})
            await self._post("resume")
            gap = await self._check_update(version, published)
            print(f"version {version} taken in {time.monotonic() - begun:.3g} s, canary gap {gap:.2g}", flush=True)
            self._version, self._updating = version, False
            self._switch()

    def _published(self, version: int) -> dict[str, Any]:
        try:
            text = (Path(self.settings.store) / str(version) / "fingerprint.json").read_text()
        except FileNotFoundError:
            raise EngineError(f"version {version} is not in {self.settings.store}") from None
        published: dict[str, Any] = json.loads(text)
        canary = published["canary"] or {"logprobs": []}
        broken = [name for name, p in published["tensors"].items() if not math.isfinite(p["sum"])]
        if broken or not all(map(math.isfinite, canary["logprobs"])):
            what = broken[0] if broken else "the publisher's own log-probs of the canary"
            raise EngineError(f"version {version}: {what} holds values that are not finite: training broke its weights")
        return published

    async def _check_update(self, version: int, published: dict[str, Any]) -> float:
        """That the live model is the published one: its weights changed, and it says the same; the canary's gap."""
        checksums = (await self._post("weight_checker", {"action": "checksum"}))["checksums"]
        tensors = json.dumps(published["tensors"], sort_keys=True)
        print_ = hashlib.sha256(tensors.encode()).hexdigest()
        before, self._checksums = self._checksums, {"published": print_, **checksums}
        if before and before["published"] != print_ and {**before, "published": print_} == self._checksums:
            raise EngineError(f"version {version}: vLLM's weights are those of the version before; nothing arrived")
        canary = published["canary"]
        if canary is None:
            return math.nan
        ids = np.asarray(canary["ids"], np.int64)[: self.settings.config.model.context - 1]
        found, expected = await self._score(ids), np.asarray(canary["logprobs"], np.float32)[: len(ids) - 1]
        gap = float(np.abs(found - expected).max())
        tolerance = canary["tolerance"] if self.settings.dtype == "float32" else _BFLOAT16_TOLERANCE
        if not gap <= tolerance:
            raise EngineError(
                f"version {version}: the canary's log-probs differ by {gap:.3g} from the publisher's (tolerance "
                f"{tolerance:g}): vLLM and the trainer do not compute the same model"
            )
        return gap

    async def drop(self, version: int) -> None:
        """Unpin `version`; the one slot keeps it until the next."""
        self._pinned.discard(version)

    async def pin(self, version: int) -> None:
        if version != self._version:
            raise EngineError(f"version {version} is not loaded, so it cannot be pinned; loaded: {self._version}")
        self._pinned.add(version)

    async def stats(self) -> EngineStats:
        self.clock.tick()
        counts, engine = self.counts, self.settings.config.engine
        used = re.search(r"^vllm:kv_cache_usage_perc\S* (\S+)$", await self._get("metrics"), re.MULTILINE)
        return EngineStats(
            versions=() if self._version is None else (self._version,),
            newest=-1 if self._version is None else self._version,
            waiting=len(self._waiting),
            running=len(self._turns),
            sessions=len(self._seen),
            kv_tokens=round(float(used[1]) * engine.kv_tokens) if used else 0,
            kv_capacity=engine.kv_tokens,
            generated_tokens=counts["generated"],
            aborted_tokens=0,  # vLLM does not say how far an aborted turn was
            computed_tokens=counts["computed"],
            cached_tokens=counts["cached"],
            recomputed_tokens=counts["recomputed"],
            busy_s=self.clock.total("busy"),
            idle_s=self.clock.total("idle"),
            paused_s=self.clock.total("paused"),
            extra={
                "idle_causes": self.clock.causes("idle_"),
                "forced_tokens": counts["forced"],
                "pinned": sorted(self._pinned),
            },
        )

    def _switch(self) -> None:
        """Open or close the gate, and tell the clock."""
        if self._paused or self._updating or self._version is None:
            self._open.clear()
        else:
            self._open.set()
        if self._turns:
            self._quiet.clear()
        else:
            self._quiet.set()
        idle = "idle_no_requests" if self._version is not None else "idle_no_weights"
        self.clock.switch("paused" if self._paused else "busy" if self._turns else idle)

    # --- the wire ---------------------------------------------------------------------------------------------

    async def _post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Raises: EngineError with vLLM's own words. Never returns once the server is gone: then we end too."""
        try:
            async with self._http.post(path, json=body, headers=headers, params=params) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            await self._lost(error)
        if response.status >= 500 and await self._unwell() is not None:
            await self._lost(None)
        if response.status != 200:
            raise EngineError(f"vLLM answered {path} with {response.status}: {_said(text)}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def _get(self, path: str) -> str:
        try:
            async with self._http.get(path) as response:
                return await response.text()
        except aiohttp.ClientError as error:
            return await self._lost(error)

    async def _lost(self, error: aiohttp.ClientError | None) -> Any:
        """Wait for our own end if the server is gone. Raises: EngineError if it is not: a connection broke."""
        await asyncio.sleep(_POLL_S)
        if error is not None and await self._unwell() is None:
            raise EngineError(f"a connection to vLLM broke ({type(error).__name__}: {error})")
        self._gone.set()
        await asyncio.Event().wait()

    async def _unwell(self) -> Exception | None:
        """Why the server is not in service; None: it is."""
        try:
            async with self._http.get("health", timeout=_LOOK) as response:
                response.raise_for_status()
                return None
        except (aiohttp.ClientError, TimeoutError) as error:
            return error

    async def _come_up(self) -> None:
        """Wait for the server, then see that it is what the run needs. Raises: ProcessFailed, ConfigError."""
        deadline_s, where = self.settings.config.engine.vllm.start_s, self.settings.url or "the vLLM server"
        # A run's first start finds a given server listening; one that falls in the run may be started again meanwhile.
        first = self.settings.url is not None and not any(Path(self.settings.store).glob("*/fingerprint.json"))
        started = time.monotonic()
        while (why := await self._unwell()) is not None:
            waited = time.monotonic() - started
            if waited > deadline_s:
                raise ProcessFailed(f"{where} was not up within engine.vllm.start_s = {deadline_s:g} s: {_words(why)}")
            if first and isinstance(why, _NOBODY) and waited > _REACH_S:
                raise ProcessFailed(f"nobody answers at {where} (engine.vllm.urls): {_words(why)}; start it first")
            await asyncio.sleep(_POLL_S)
        check_version(json.loads(await self._get("version"))["version"], where)
        try:
            await self._post("init_weight_transfer_engine", {"init_info": {"store": self.settings.store}})
        except EngineError as error:
            raise ConfigError(f"{where} takes no weights from us ({error}); start it as docs/vllm.md says") from None
        if self.settings.url is not None:  # a run that was killed, or refused a version, left it paused in an update
            with contextlib.suppress(EngineError):  # it did not
                await self._post("finish_weight_update")
            await self._post("resume")
        await self._check_tokenizer(where)

    async def _check_tokenizer(self, where: str) -> None:
        """That the server writes text in our ids, reads ids as our text, and decodes its own replies as we do."""
        chat = load_chat(Path(self.settings.model), self.settings.config.model.tool_format)
        text = _PROBE + "".join(token for token, _ in chat.ends)
        ours = chat.encode(text).tolist()
        theirs = (await self._post("tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        if theirs != ours:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), "the end")
            raise ConfigError(
                f"{where} has another tokenizer than {self.settings.model}: ids differ at {at} of a probe"
            )
        sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 0, "skip_special_tokens": False, **_PLAIN}
        body = {"token_ids": ours, "output_mode": "text", "sampling_params": sampling}
        (choice,) = (await self._post("inference/v1/generate", body))["choices"]
        if wrong := undecodable(chat, choice["token_ids"], choice["text"]):
            raise ConfigError(f"{where}: {wrong}; mend its tokenizer")


def _words(error: Exception) -> str:
    """In a line."""
    cause = getattr(error, "os_error", error)  # a connection's
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(error).__name__


def _said(text: str) -> str:
    """The words of an error's body."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        data = json.loads(text)
        text = data["error"]["message"] if isinstance(data.get("error"), dict) else data.get("error") or data["detail"]
    return " ".join(str(text).split())[:400]
