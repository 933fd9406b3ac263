"""The run configuration: one typed tree, checked before anything heavy starts.

Owns: every option's name, type, default and bounds, and `load_config` (a TOML file plus `--set a.b=c`). Invariants:
an unknown key, a bad value and a contradiction are one clear line (`ConfigError`) that names the key and the remedy;
the resolved tree is written to the run directory and reads back equal.
Called by: the CLI, `springtide.train`, and every process of a run (each gets the resolved tree).
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from springtide.sampling import SamplingTable
from springtide.tables import Natural, Positive, Processes, Seconds, Share, Table
from springtide.trace import REWARD_LIMIT
from springtide.training import Reference, Trainer

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0  # logits are divided by it, in float32


class ConfigError(Exception):
    """A configuration that cannot run. One line: which key, what was given, what is allowed."""


class Run(Table):
    name: str = Field("run", pattern=r"^\w[\w.\-]*$", description="the run directory's name")
    dir: str = Field("runs", description="where run directories are made")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of tasks, tokens and everything else that is random")
    steps: Positive = Field(100, description="optimiser steps")
    minutes: float | None = Field(
        None, gt=0, le=1e6, description="stop after this many minutes of training, if earlier"
    )


class Model(Table):
    path: str = Field("springtide-nano", description="a Hugging Face directory, or the name of a shipped model")
    tool_format: Literal["auto", "hermes", "glm", "plain"] = Field(
        "auto", description="how calls are written; auto reads it from the chat template (docs/models.md)"
    )
    context: int = Field(1024, gt=0, le=10**7, description="tokens an episode may reach: then it ends as context_limit")


class VllmTable(Table):
    python: str | None = Field(
        None, description="the interpreter of an environment that holds vLLM: each engine rank starts a server in it"
    )
    urls: tuple[str, ...] = Field((), description="instead, servers that run already, one a rank (docs/vllm.md)")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of its weights and KV; auto: float32 on a CPU, else bfloat16"
    )
    args: tuple[str, ...] = Field((), description='more arguments of its server, as ["--enforce-eager"]')
    start_s: Seconds = Field(600.0, description="deadline for a server to start")

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.match(r"https?://[^/\s]+", url):
                raise ValueError(f"{url!r} is no vLLM server's URL; write it as http://HOST:PORT")
        return urls


class EngineTable(Table):
    kind: Literal["local", "vllm"] = Field(
        "local", description="the engine in PyTorch that comes with Springtide, or vLLM in an environment of its own"
    )
    ranks: Processes = Field(1, description="engine processes; a stale pool on vLLM is one more")
    max_batch: int = Field(128, gt=0, le=16384, description="sequences decoded together")
    kv_tokens: int = Field(65536, gt=0, le=10**8, description="tokens of KV cache an engine holds, over all versions")
    prefill_chunk: int = Field(2048, gt=0, le=10**6, description="prompt tokens computed in one step")
    weight_slots: int = Field(4, gt=0, le=64, description="weight versions an engine holds at once; vLLM holds one")
    device: str = Field("cpu", description="the torch device of the engines")
    vllm: VllmTable = VllmTable()

    @property
    def slots(self) -> int:
        """Weight versions an engine rank holds at once."""
        return 1 if self.kind == "vllm" else self.weight_slots


Seat = Literal["rollout", "reference", "trainer", "worker", "env"]  # a rank's role, a rollout or environment worker
Port = Annotated[int, Field(ge=0, le=65535)]


class RayTable(Table):
    address: str | None = Field(
        None, description="HOST:PORT of a cluster's head, or auto; unset: a Ray of its own, here"
    )
    object_store_mb: int = Field(
        80, ge=80, le=10**6, description="memory of that Ray's object store, which stays empty"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="of the run's placement group: on few nodes, or on many"
    )
    ports: tuple[Port, Port] = Field((0, 0), description="range that processes listen in; 0, 0: any that is free")
    resources: dict[Seat, dict[str, Annotated[float, Field(ge=0, le=1e6)]]] = Field(
        {}, description="what a process of a kind takes of its node; else 1 CPU, and 1 GPU where its device is cuda"
    )
    labels: dict[Seat, dict[str, str]] = Field({}, description="labels of the nodes that a kind of process may use")

    @model_validator(mode="after")
    def _usable_places(self) -> RayTable:
        if self.ports[0] > self.ports[1] or (self.ports[0] == 0) != (self.ports[1] == 0):
            raise ValueError(f"ports: {self.ports} is no range of ports; give the lowest and the highest")
        for kind, amounts in self.resources.items():
            if not any({"CPU": 1.0, **amounts}.values()):
                raise ValueError(f"resources.{kind}: nothing is left; Ray places only what takes something")
        return self


class PaceTable(Table):
    device: Literal["none", "h100", "h200", "a100", "h20"] = Field(
        "none", description="the GPU whose time engines and trainers take for their work; none: as fast as they can"
    )
    model: str = Field(
        "qwen2.5-7b", description="the model that time is of: a name of docs/pace.md, or a directory with a config.json"
    )
    tensor_parallel: Processes = Field(1, description="such GPUs an engine or reference rank stands for")
    trainer_devices: Processes = Field(2, description="such GPUs a trainer rank stands for")
    recompute: bool = Field(True, description="activations are computed again in the backward pass: 8N, not 6N")
    scale: Annotated[float, Field(ge=1e-3, le=1e4)] | Literal["auto"] = Field(
        1.0, description="seconds here for one of the GPU's; auto: as a short calibration finds it"
    )


class RuntimeTable(Table):
    kind: Literal["local", "ray"] = Field("local", description="all processes on this machine, or on a Ray cluster")
    rollout_workers: Processes = Field(1, description="processes that play episodes: rendering, parsing, agent loop")
    env_workers: Processes = Field(1, description="processes that environments run in, many episodes in each")
    start_s: Seconds = Field(120.0, description="deadline for any process of the run to start")
    silent_s: float = Field(
        60.0, ge=0.1, le=60, description="one that answers nothing for so long is killed, and has crashed"
    )
    ray: RayTable = RayTable()
    pace: PaceTable = PaceTable()


class SuiteEntry(Table):
    use: str = Field(description="a registered suite, FILE.py:Class, or a file of data (docs/own_data.md)")
    split: Literal["train", "test", "ood"] = Field("train", description="what is trained on; its dev tenth never is")
    level: str | None = Field(None, description="one of the suite's levels; default: quick, else the suite's first")
    weight: float = Field(
        1.0, ge=1e-6, le=1e6, description="share of the consumed task mixture, relative to the others"
    )


class GroupTable(Table):
    n: int = Field(8, gt=0, le=10_000, description="members of a group")
    min_members: Positive | None = Field(
        None, description="a group at its deadline is trained from this many; default n"
    )
    retries: int = Field(2, ge=0, le=1000, description="fresh environments for a member lost to an environment error")
    deadline_s: Seconds = Field(
        300.0, description="from a group's first start, evaluations aside; then trained or dropped"
    )


class Rollout(Table):
    temperature: float = Field(
        1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="of sampling in training; the loss divides logits by it too",
    )
    max_new_tokens: Positive = Field(64, description="tokens a turn may have")
    max_turns: Positive | None = Field(None, description="fewer turns than the environment allows")
    concurrency: int = Field(24, gt=0, le=100_000, description="groups in flight")
    environments: Positive | None = Field(None, description="most that are open at once; a larger group plays alone")
    context: Literal["full"] = Field("full", description="what a turn sees of the episode: all of it")
    group: GroupTable = GroupTable()
    sampling: SamplingTable = SamplingTable()
    stale_probability: Share = Field(0.0, description="cross-policy sampling: share of turns drawn from the stale pool")
    stale_refresh: Positive = Field(10, description="steps between refreshes of the stale pool")


class Staleness(Table):
    bound: Natural = Field(2, description="steps a group may lag behind the weights it trains")
    overage: Literal["wait", "drop"] = Field(
        "wait", description="of a group about to pass the bound: the trainer waits for it, or it is dropped and counted"
    )


class Schedule(Table):
    policy: Literal[
        "synchronous",
        "one_step_off",
        "fixed_split",
        "kv_aimd",
        "program_aware",
        "hybrid_ranks",
        "oracle_split",
        "springtide",
    ] = Field(
        "fixed_split",
        description="what plays where and when; synchronous: in turns with training, so a run repeats bit for bit",
    )
    strict: bool = Field(False, description="an invalid action of a policy is an error instead of a counted refusal")


class Algorithm(Table):
    advantage: Literal["group_relative", "leave_one_out"] = Field(
        "group_relative", description="a member against its group's mean, or against the mean of the others"
    )
    divide_by_std: bool = Field(True, description="divide group-relative advantages by the group's standard deviation")
    task_norm: Literal["none", "batch", "running"] = Field("batch", description="normalise advantages by suite")
    equal_rewards: Literal["drop", "keep"] = Field(
        "drop", description="groups whose members all earned the same: dropped, counted and refilled, or trained"
    )
    incomplete_reward: float = Field(
        -0.2,
        ge=-REWARD_LIMIT,
        le=REWARD_LIMIT,
        description="reward of a turn, context or time limit or invalid action",
    )
    loss: Literal["ppo_clip", "gspo", "cispo"] = Field(
        "ppo_clip", description="a ratio a token and clipped gradients, a ratio a sequence, or clipped weights"
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description="the ratio is clipped at 1 - clip_low; unset: 0.2 (gspo 3e-4, cispo 1)"
    )
    clip_high: float | None = Field(
        None, gt=0, le=1e6, description="and at 1 + clip_high; unset: 0.28 (gspo 4e-4, cispo 4)"
    )
    dual_clip: float = Field(
        3.0, gt=1, le=1e6, description="ppo_clip: for A < 0 a token's loss is at most this times -A"
    )
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout", description="the ratio's denominator: as sampled, or by a rank of its own with the step's weights"
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "truncate", description="pi_old/pi_rollout as a weight, bounded so; with recompute only"
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="that weight of a token, a segment's product, or its geometric mean"
    )
    weight_cap: float | None = Field(
        None, gt=0, le=1e6, description="largest such weight; unset: 2. With recompute only"
    )
    weight_floor: float | None = Field(
        None, gt=0, le=1e6, description="smallest such weight under mask; unset: 1 / weight_cap. With recompute only"
    )
    # Up to what float32 holds: a loss that overflows is refused by the step, with this key in its line.
    kl_coef: float = Field(0.0, ge=0, le=3e38, description="weight of the KL to the reference")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="how that KL is estimated; k1 in the reward only")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="added to the loss of each token, or taken off the episode's reward before the baseline"
    )
    entropy_coef: float = Field(0.0, ge=0, le=1e6, description="bonus for the policy's entropy, in nats a token")
    aggregation: Literal["token_mean", "trajectory_mean", "segment_mean"] = Field(
        "token_mean", description="what the loss is a mean over"
    )


class Weights(Table):
    update_at: Literal["turn", "episode"] = Field(
        "turn", description="when an episode takes new weights: at its next turn, or only at its start"
    )
    dir: str | None = Field(None, description="where published weights live; default /dev/shm, else the run directory")


class Eval(Table):
    every: Natural = Field(0, description="steps between evaluations during training; 0 for none")
    tasks: Positive = Field(64, description="tasks a suite")
    split: Literal["train", "test", "ood"] = Field("test", description="what is evaluated on")
    samples: int = Field(1, gt=0, le=10_000, description="sampled episodes a task")
    greedy: bool = Field(True, description="also one greedy episode a task")
    at_ends: bool = Field(True, description="evaluate before the first and after the last step")
    dev: bool = Field(False, description="evaluate the dev tenth of `train` instead of `split`")


class Observe(Table):
    progress: bool = Field(True, description="a board on a terminal, a line a step elsewhere")
    tensorboard: bool = Field(False, description="also write TensorBoard files (springtide[tensorboard])")
    wandb: str | None = Field(None, description="also log to this Weights & Biases project (springtide[wandb])")
    report: bool = Field(True, description="write report.html and curve.png at the end")
    events: Literal["all", "groups"] = Field(
        "all", description="what events.jsonl holds: groups leaves out episodes' turns, and cannot be replayed"
    )


class Fabric(Table):
    mode: Literal["local"] = Field("local", description="environments run on this machine")


class Config(Table):
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    engine: EngineTable = EngineTable()
    runtime: RuntimeTable = RuntimeTable()
    suites: tuple[SuiteEntry, ...] = ()
    rollout: Rollout = Rollout()
    staleness: Staleness = Staleness()
    schedule: Schedule = Schedule()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    reference: Reference = Reference()
    weights: Weights = Weights()
    eval: Eval = Eval()
    observe: Observe = Observe()
    fabric: Fabric = Fabric()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        def need(condition: bool, text: str) -> None:
            if not condition:
                raise ValueError(text)

        group, algorithm = self.rollout.group, self.algorithm
        need(bool(self.suites), 'suites: name at least one, as [[suites]] with use = "db"')
        names = [s.use for s in self.suites]
        need(len(set(names)) == len(names), f"suites: {names} names one twice; give each once, with a weight")
        need(group.n >= 2, "rollout.group.n: a group-relative advantage needs at least 2 members")
        need((group.min_members or group.n) <= group.n, "rollout.group.min_members: more than rollout.group.n")
        need((group.min_members or group.n) >= 2, "rollout.group.min_members: needs at least 2 members")
        cap = algorithm.weight_cap or 2.0
        corrected = algorithm.old_logprobs == "recompute" and algorithm.correction != "none"
        for name in ("correction_level", "weight_cap", "weight_floor"):
            need(
                corrected or getattr(algorithm, name) == Algorithm.model_fields[name].default,
                f'algorithm.{name}: a corrected weight needs algorithm.old_logprobs = "recompute" and a correction',
            )
        need(
            algorithm.weight_floor is None or algorithm.correction == "mask",
            'algorithm.weight_floor: only algorithm.correction = "mask" has a floor',
        )
        need(
            algorithm.correction != "mask" or (algorithm.weight_floor or 1 / cap) < cap,
            "algorithm.weight_floor: must be less than algorithm.weight_cap (unset, they are 1 / weight_cap and 2)",
        )
        need(
            algorithm.kl_coef == 0 or algorithm.kl_in == "reward" or algorithm.kl_estimator != "k1",
            "algorithm.kl_estimator: k1 as a loss has a gradient of mean zero, so it holds nothing; take k2 or k3, or "
            'algorithm.kl_in = "reward"',
        )
        need(
            self.rollout.stale_probability == 0 or self.engine.slots >= 3 or self.engine.kind == "vllm",
            "rollout.stale_probability: the stale pool needs engine.weight_slots >= 3",
        )
        vllm = self.engine.vllm
        need(self.engine.kind == "vllm" or vllm == VllmTable(), 'engine.vllm: is read with engine.kind = "vllm" only')
        need(
            self.engine.kind == "local" or (vllm.python is None) == bool(vllm.urls),
            'engine.kind: "vllm" needs engine.vllm.python, the interpreter of its environment, or engine.vllm.urls '
            "(docs/vllm.md)",
        )
        need(
            len(vllm.urls) in (0, self.engines),
            f"engine.vllm.urls: {len(vllm.urls)} servers for {self.engines} engines (a stale pool needs its own)",
        )
        need(
            self.engine.kind == "local" or self.rollout.temperature >= 0.01,
            "rollout.temperature: vLLM takes anything below 0.01 for 0.01",
        )
        need(
            self.eval.every == 0
            or self.schedule.policy == "synchronous"
            or self.engine.slots >= 2
            or self.engine.kind == "vllm",  # there, a publication waits for the evaluation
            "eval.every: an evaluation beside training is pinned to its weights, so it needs engine.weight_slots >= 2",
        )
        need(
            self.engine.kv_tokens >= self.model.context,
            f"engine.kv_tokens: {self.engine.kv_tokens} is less than model.context ({self.model.context})",
        )
        need(
            self.rollout.max_new_tokens < self.model.context,
            "rollout.max_new_tokens: must be less than model.context",
        )
        trainer = self.trainer
        for name in ("param_dtype", "reduce_dtype"):
            need(
                trainer.sharding == "fsdp" or getattr(trainer, name) == "float32",
                f'trainer.{name}: bfloat16 needs trainer.sharding = "fsdp" (trainer.ranks = 1 will do)',
            )
        need(
            self.reference.pipeline == "auto" or algorithm.kl_coef > 0,
            "reference.pipeline: there is no reference without algorithm.kl_coef",
        )
        need(
            self.reference.pipeline == "auto" or not self.adapter_is_reference,
            "reference.pipeline: an adapter is its own reference, turned off; give reference.path, or leave it auto",
        )
        lends = self.schedule.policy in ("hybrid_ranks", "springtide")
        need(not trainer.lend or lends, f"trainer.lend: schedule.policy {self.schedule.policy} lends no rank")
        need(
            self.schedule.policy != "hybrid_ranks" or trainer.lend,
            "schedule.policy: hybrid_ranks needs ranks that play while they wait; set trainer.lend = true",
        )
        need(
            not trainer.lend or self.runtime.kind == "local",
            'trainer.lend: a guest has no place on Ray yet; set runtime.kind = "local"',
        )
        need(
            self.schedule.policy != "synchronous" or self.runtime.rollout_workers == 1,
            "schedule.policy: synchronous is bit-reproducible, so it needs runtime.rollout_workers = 1",
        )
        return self

    @property
    def adapter_is_reference(self) -> bool:
        """Whether the trainer's adapter, turned off, is the KL reference."""
        return self.trainer.lora.rank > 0 and self.reference.path is None

    @property
    def reference_apart(self) -> bool:
        """Whether the KL reference is a rank of its own."""
        apart = self.reference.pipeline in ("auto", "streaming") and not self.adapter_is_reference
        return self.algorithm.kl_coef > 0 and apart

    @property
    def stale_apart(self) -> bool:
        """Whether the stale pool is an engine of its own, the last: where one holds a single version."""
        return self.engine.kind == "vllm" and self.rollout.stale_probability > 0

    @property
    def engines(self) -> int:
        return self.engine.ranks + self.stale_apart

    @property
    def min_members(self) -> int:
        return self.rollout.group.min_members or self.rollout.group.n

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(exclude_none=True, mode="json"))


# What `--resume` may change: nothing that alters what a finished step meant.
RESUMABLE = frozenset(
    {
        "run.steps",
        "run.minutes",
        "runtime.env_workers",
        "runtime.start_s",
        "runtime.silent_s",
        "runtime.kind",
        "runtime.ray.address",
        "runtime.ray.labels",
        "runtime.ray.object_store_mb",
        "runtime.ray.ports",
        "runtime.ray.resources",
        "runtime.ray.strategy",
        "trainer.checkpoint_every",
        "trainer.checkpoint_keep",
        "trainer.ranks",
        "trainer.sharding",
        "trainer.activation_checkpointing",
        "eval.every",
        "observe.progress",
        "observe.tensorboard",
        "observe.wandb",
        "observe.report",
    }
)


def load_config(path: Path, sets: tuple[str, ...] = ()) -> Config:
    """Read a TOML file, apply `--set a.b=c` items in order, and check. Raises: ConfigError."""
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} holds a NUL character, which no path can")
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, nested without end
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for item in sets:
        apply_set(data, item)
    return _beside(make_config(data), path.parent)


_SUITE_FILES = (".py", ".toml", ".jsonl", ".parquet")


def _beside(config: Config, directory: Path) -> Config:
    """The configuration with the files of its suites found in its own directory, where there are none from here."""

    def found(entry: SuiteEntry) -> SuiteEntry:
        file, colon, name = entry.use.rpartition(":")
        if not file.endswith(".py"):
            file, colon, name = entry.use, "", ""
        near = directory.resolve() / file
        if Path(file).suffix not in _SUITE_FILES or os.path.isfile(file) or not os.path.isfile(near):
            return entry
        return entry.model_copy(update={"use": f"{near}{colon}{name}"})

    return config.model_copy(update={"suites": tuple(map(found, config.suites))})


def make_config(data: dict[str, Any]) -> Config:
    """Check a plain tree. Raises: ConfigError with one line a fault."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_line(e) for e in error.errors())) from None


def changed_keys(old: Config, new: Config) -> set[str]:
    """Dotted keys whose values differ; a list counts as one key, and so does a table with keys of the user's own."""

    def walk(a: Any, b: Any, prefix: str) -> set[str]:
        if isinstance(a, Table):
            return set().union(
                *(walk(getattr(a, k), getattr(b, k), f"{prefix}.{k}" if prefix else k) for k in type(a).model_fields)
            )
        return set() if a == b else {prefix}

    return walk(old, new, "")


def _line(error: Any) -> str:
    where = ".".join(str(p) for p in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        table = ".".join(str(p) for p in error["loc"][:-1]) or "the configuration"
        message = f"no such key in {table}; see docs/configuration.md"
    elif where and error["type"] != "value_error":
        message = f"{message}, not {_shown(error['input'])}"
    return f"{where}: {message}" if where else message


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no number of thousands of digits
        return f"such a {type(value).__name__}"


def apply_set(data: dict[str, Any], item: str) -> None:
    """Change one key of a plain tree, as `--set` says. Raises: ConfigError."""
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {item!r}: write it as table.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists nested without end
        raise ConfigError(f"--set {item!r:.80}: {error}") from None
    *path, last = key.strip().split(".")
    node: Any = data
    for depth, part in enumerate(path):
        try:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        except (ValueError, IndexError):
            raise ConfigError(f"--set {item!r}: {'.'.join(path[: depth + 1])} is not an entry of the list") from None
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"--set {item!r}: {'.'.join(path[: depth + 1])} is not a table")
    if isinstance(node, list):
        raise ConfigError(f"--set {item!r}: name an entry, as {'.'.join(path)}.0.{last}")
    node[last] = value
