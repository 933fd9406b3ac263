"""The checks behind `springtide doctor cluster`: a configuration on the machines it names, before it costs a run.

Owns: what is tried and what counts as wrong. Invariants: what starts is what a run starts (`open_runtime`, by
`runtime.kind`), with the configured engine, trainer ranks and store; it publishes once and samples once, and leaves
nothing in the run's directory; what is only computed says so; nothing is started where the memory would not do.
Called by: `cli.doctor`, tests.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from springtide.chat import load_chat
from springtide.chat.template import ChatError
from springtide.cli import footprint
from springtide.cli.footprint import ModelSize, gib
from springtide.config import Config, ConfigError
from springtide.engine.client import EngineClient
from springtide.engine.protocol import EngineError, Generation, Sampling
from springtide.engine.vllm_server import SUPPORTED
from springtide.env.check import Kind, Verdict
from springtide.env.suite import SuiteError
from springtide.models.presets import ModelNotFound, resolve_model
from springtide.mounts import file_system
from springtide.process import ProcessFailed, root_cause, scratch_directory
from springtide.runtime.local import Runtime, open_runtime
from springtide.trace import Message, sampling_seed
from springtide.trainer.start import check
from springtide.wire import ConnectionLost, DeadlineExceeded

_TIGHT = 0.8  # of what there is: more is a warning
_CALL_S, _TOKENS = 600.0, 16
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs", "9p")

_SAY_IT = (ConfigError, SuiteError, ProcessFailed, EngineError, ConnectionLost, DeadlineExceeded)  # lines already

Finding = tuple[Kind, str]


class ClusterChecker:
    """Checks by name, to be run in order inside `async with`: later ones use what earlier ones opened."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: ModelSize | None = None
        self._directory: Path | None = None
        self._blocked: list[str] = []  # the checks that failed and let nothing be started
        self._started: dict[str, Finding] = {}
        self.checks: dict[str, Callable[[], Awaitable[Finding]]] = {
            "configuration": self._configuration,
            "versions": self._versions,
            "devices": self._devices,
            "memory": self._memory,
            "weight store": self._weight_store,
            "run directory": self._run_directory,
            "ports": self._ports,
            "processes": self._processes,
            "publication": lambda: self._later("publication"),
            "canary": lambda: self._later("canary"),
        }

    async def run(self, name: str) -> Verdict:
        """Make one check."""
        try:
            kind, detail = await self.checks[name]()
        except (ConfigError, SuiteError, ModelNotFound, ChatError, OSError) as error:
            kind, detail = "failed", str(error)
        if kind == "failed":
            self._blocked.append(name)
        return Verdict(name, kind, " ".join(detail.split()))

    # --- what is computed or looked at --------------------------------------------------------------------------

    async def _configuration(self) -> Finding:
        config = self._config
        try:
            self._directory = resolve_model(config.model.path)
            self._model = ModelSize.read(self._directory)
        finally:  # what `check` says is said in any case
            await check(config)
        told = f"{config.model.path}, {self._model.parameters / 1e6:,.1f} M parameters; {len(config.suites)} suites"
        return "ok", f"{told}; runtime.kind = {config.runtime.kind}, engine.kind = {config.engine.kind}"

    async def _versions(self) -> Finding:
        """Of what the package's own metadata asks for."""
        from packaging.requirements import Requirement

        extras = ["train", *(["ray"] if self._config.runtime.kind == "ray" else [])]
        found, wrong = [f"python {sys.version.split()[0]}"], []
        for text in importlib.metadata.requires("springtide") or ():
            need = Requirement(text)
            if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            try:
                version = importlib.metadata.version(need.name)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{need.name} is missing (pip install '{need.name}{need.specifier}')")
                continue
            if need.name in ("torch", "transformers", "ray"):
                found.append(f"{need.name} {version}")
            if not need.specifier.contains(version, prereleases=True):
                wrong.append(f"{need.name} is {version}, needed is {need.specifier}")
        if wrong:
            return "failed", "; ".join(wrong)
        if self._config.engine.vllm.python is not None and not self._blocked:  # else refused above, perhaps
            found.append(f"vLLM {SUPPORTED}.*")
        return "ok", ", ".join(found)

    async def _devices(self) -> Finding:
        config = self._config
        wanted = {config.trainer.device, *(() if config.engine.vllm.urls else (config.engine.device,))}
        cores = len(os.sched_getaffinity(0))
        if not any(d != "cpu" for d in wanted):
            busy = config.trainer.ranks + config.engines  # the others wait for these most of the time
            text = f"cpu, {cores} cores for {config.trainer.ranks} trainer ranks and {config.engines} engines"
            if config.runtime.kind == "local" and busy > cores:
                return "warning", f"{text}: they take turns; name fewer ranks, or a machine with more"
            return "ok", text
        gpus = await asyncio.to_thread(visible_gpus)
        text = "; ".join(f"{g['name']}, {gib(g['free'])} of {gib(g['total'])} free" for g in gpus) or "no GPU"
        if config.runtime.kind == "ray":
            return "ok", f"{text} here; those of the nodes are Ray's to give (processes, below)"
        if not gpus:
            return "failed", f"{', '.join(sorted(wanted - {'cpu'}))} is asked for, and torch sees no GPU"
        if config.trainer.ranks > len(gpus) and config.trainer.device != "cpu":
            return "failed", f"trainer.ranks = {config.trainer.ranks}, but {len(gpus)} GPUs are visible: {text}"
        return "ok", text

    async def _memory(self) -> Finding:
        """Computed, not measured: at their largest, all processes at once."""
        if self._model is None or self._directory is None:
            return "skipped", "the model could not be read"
        config, model = self._config, self._model
        needs = footprint.needs(config, model)
        told = f"computed: {footprint.listed(needs)}"
        if config.runtime.kind == "ray" and config.runtime.ray.address is not None:
            return "skipped", f"{told}; what the cluster's nodes have is not compared"
        where = store_parent(config)
        stored = footprint.stored_bytes(config, model) if file_system(where) == "tmpfs" else 0
        wanted, there = sum(n.cpu for n in needs.values()) + stored, footprint.available_memory()
        told += f", published weights in memory {gib(stored)}" if stored else ""
        findings = [_fits(wanted, there, f"this machine's memory ({told})")]
        on_gpu = [n.on_device for n in needs.values() if n.device != "cpu"]
        gpus = await asyncio.to_thread(visible_gpus) if on_gpu else []
        if gpus:
            findings += [_fits(max(on_gpu), max(g["free"] for g in gpus), "the largest GPU, by its largest process")]
            findings += [_fits(sum(on_gpu), sum(g["free"] for g in gpus), "all GPUs together")]
        worst: Kind = max((kind for kind, _ in findings), key=("ok", "warning", "failed").index)
        remedy = "; less: trainer.micro_tokens, trainer.lora.rank, engine.kv_tokens, engine.weight_slots, fewer ranks"
        return worst, "; ".join(text for _, text in findings) + (remedy if worst != "ok" else "")

    async def _weight_store(self) -> Finding:
        if self._model is None:
            return "skipped", "the model could not be read"
        where = store_parent(self._config)
        wanted = footprint.stored_bytes(self._config, self._model)
        kind, text = _fits(wanted, shutil.disk_usage(where).free, f"{where} ({file_system(where) or 'unknown'})")
        if self._config.runtime.kind == "ray" and self._config.runtime.ray.address is not None:
            text += "; where there are several nodes, the run's own directory or weights.dir"
        return kind, text + ("; weights.dir names another place" if kind != "ok" else "")

    async def _run_directory(self) -> Finding:
        config, place = self._config, Path(self._config.run.dir)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        kind_of = file_system(place) or "unknown"
        wanted = footprint.checkpoint_bytes(config, self._model) if self._model else 0
        kind, text = _fits(wanted, shutil.disk_usage(place).free, f"{place} ({kind_of}), writable, for checkpoints")
        notes = []
        if kind_of == "tmpfs":
            notes.append("it is in memory: a run there is gone with the machine")
        if kind_of in _NETWORK and config.runtime.kind == "local":
            notes.append("the ledger's file is in a mode that network file systems do not keep safe with two machines")
        if (place / config.run.name / "ledger.sqlite").exists():
            notes.append(f"{config.run.name} is a run that is there already: continue it with --resume")
        return ("warning" if notes and kind == "ok" else kind), "; ".join([text, *notes])

    async def _ports(self) -> Finding:
        config = self._config
        if urls := config.engine.vllm.urls:
            for url in urls:
                await asyncio.to_thread(_need_answer, url)
            return "ok", f"{len(urls)} vLLM servers answer"
        if config.runtime.kind == "local":
            return "ok", "none is used: processes meet at Unix sockets in a directory that only you can read"
        first, last = config.runtime.ray.ports
        if not first:
            return "ok", "any that is free (runtime.ray.ports = [0, 0])"
        taken = [port for port in range(first, last + 1) if not _free(port)]
        count, free = len(process_names(config)), last - first + 1 - len(taken)
        text = f"{free} of {first} to {last} are free here, {count} processes listen"
        if free < count:
            return "failed", f"{text}; taken: {', '.join(map(str, taken[:8])) or 'none'}; widen runtime.ray.ports"
        return "ok", text

    # --- what is started ----------------------------------------------------------------------------------------

    async def _processes(self) -> Finding:
        """All processes of the run, as the run starts them, in a directory beside where it will lie."""
        if self._blocked or self._directory is None:
            return "skipped", f"nothing was started: {', '.join(self._blocked)} failed"
        stage = "processes"
        try:
            with scratch_directory(".doctor-", Path(self._config.run.dir)) as directory:
                started = time.monotonic()
                async with open_runtime(self._config, directory, self._directory, checkpoint=None) as runtime:
                    await asyncio.gather(*(rank.wait_up() for rank in (*runtime.engines, *runtime.workers)))
                    await runtime.trainer.call("status", deadline_s=_CALL_S)
                    names = ", ".join(process_names(self._config))
                    self._started[stage] = "ok", f"{names} came up in {time.monotonic() - started:.1f} s"
                    for stage, make in (("publication", self._publish), ("canary", self._sample)):
                        self._started[stage] = await make(runtime)
        except (Exception, BaseExceptionGroup) as error:  # whatever ends a process is the finding
            cause = root_cause(error) if isinstance(error, BaseExceptionGroup) else error
            if not isinstance(cause, Exception):
                raise
            self._started[stage] = (
                "failed",
                str(cause) if isinstance(cause, _SAY_IT) else f"{type(cause).__name__}: {cause}",
            )
        return self._started["processes"]

    async def _later(self, name: str) -> Finding:
        return self._started.get(name, ("skipped", "what comes before it failed, so nothing runs to do it"))

    async def _publish(self, runtime: Runtime) -> Finding:
        """The trainer's weights into the store, and every engine pulls and verifies them."""
        started = time.monotonic()
        await runtime.trainer.call("publish", deadline_s=_CALL_S, version=0)
        published = time.monotonic()
        await runtime.load(0)
        seconds = f"published in {published - started:.2f} s, pulled in {time.monotonic() - published:.2f} s"
        size = gib(4 * self._model.parameters) if self._model else "the weights"
        return "ok", (
            f"{size} in {runtime.weights.parent}: {seconds}; fingerprint and log-probs of a canary "
            f"confirmed by {self._config.engine.ranks} engine{'s' * (self._config.engine.ranks > 1)}"
        )

    async def _sample(self, runtime: Runtime) -> Finding:
        """A turn of every engine, twice: the tokens decode, their log-probs are numbers, and a seed repeats."""
        chat = load_chat(runtime.model_dir, self._config.model.tool_format)
        prompt = chat.start([Message("user", "Say hello.")], ()).ids
        tokens = min(_TOKENS, self._config.rollout.max_new_tokens, self._config.model.context - len(prompt))
        if tokens < 1:
            return "failed", f"model.context holds no reply to a prompt of {len(prompt)} tokens"
        sampling = Sampling(sampling_seed(0, "train", "doctor", 0, 0, 0), 0, tokens, 1.0, chat.stop_ids)
        said, repeats, speeds = "", True, []
        for engine in runtime.engines:
            if engine is runtime.stale:
                continue
            drawn: list[Generation] = []
            async with EngineClient.connect(engine.socket_path, name=engine.name) as client:
                for number in range(2):
                    drawn.append(await client.generate(f"doctor-{number}", prompt, sampling))
                    await client.release(f"doctor-{number}")
            for g in drawn:
                if not len(g.ids) or not np.isfinite(g.logprobs).all() or bool((g.logprobs > 0).any()):
                    return "failed", f"{engine.name} sampled {len(g.ids)} tokens with log-probs {g.logprobs.tolist()}"
                if not bool(((g.ids >= 0) & (g.ids < chat.vocab_size)).all()):
                    return "failed", f"{engine.name} sampled ids that the tokenizer lacks: {g.ids.tolist()}"
            repeats &= bool(np.array_equal(drawn[0].ids, drawn[1].ids))
            speeds.append(len(drawn[1].ids) / max(drawn[1].decode_s, 1e-9))
            said = chat.decode(drawn[0].ids)
        told = f"{', '.join(f'{speed:.0f}' for speed in speeds)} tokens/s of one sequence; it says {said[:60]!r}"
        if not repeats:
            return "warning", f"the same seed sampled something else the second time, as some kernels do; {told}"
        return "ok", f"the same seed repeats; {told}"


def process_names(config: Config) -> list[str]:
    """The processes of a run. What each holds does not matter here."""
    return list(footprint.needs(config, ModelSize(0, 0, 0, 0, 0, 0)))


def store_parent(config: Config) -> Path:
    """Where `runtime.local.weights_directory` puts published weights, or the nearest directory there is of it."""
    shared = Path("/dev/shm")
    place = Path(config.weights.dir) if config.weights.dir else shared if os.access(shared, os.W_OK) else config.run_dir
    place = place.resolve()
    while not place.is_dir():
        place = place.parent
    return place


def visible_gpus() -> list[dict[str, Any]]:
    """`{name, free, total}` of each GPU that torch sees. Asked of a process: this one loads no torch."""
    code = (
        "import json, torch\n"
        "found = []\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    free, total = torch.cuda.mem_get_info(i)\n"
        "    found.append({'name': torch.cuda.get_device_name(i), 'free': free, 'total': total})\n"
        "print(json.dumps(found))\n"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    found: list[dict[str, Any]] = json.loads(asked.stdout) if asked.returncode == 0 else []
    return found


def _fits(wanted: int, there: int, where: str) -> Finding:
    kind: Kind = "failed" if wanted > there else "warning" if wanted > _TIGHT * there else "ok"
    verb = {"failed": "needs more than there is:", "warning": "is nearly full:", "ok": ""}[kind]
    return kind, f"{where} {verb} {gib(wanted)} of {gib(there)}"


def _free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
        return True


def _need_answer(url: str) -> None:
    """Raises: ConfigError if no server answers at `url`."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10):
            return
    except urllib.error.HTTPError:
        return  # it answers; what it is, its engine process finds out
    except (OSError, ValueError) as error:
        told = getattr(error, "reason", error)
        raise ConfigError(f"engine.vllm.urls: nobody answers at {url}: {told}; start the server first") from None
