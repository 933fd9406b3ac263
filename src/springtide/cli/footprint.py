"""How much memory a run's processes need, from its configuration and its model's files, before any of them starts.

Owns: the arithmetic. Invariants: no tensor is read and torch is not imported; what cannot be known (what environments
hold, what a library takes) is a constant here and said as an estimate.
Called by: `cli.cluster_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from springtide.config import Config
from springtide.models.presets import kv_values, setting, tensor_shapes, vocab_size

# A process before it holds anything of the model: Python with torch and transformers, without them, and vLLM's two.
TORCH_BYTES, PLAIN_BYTES, VLLM_BYTES = 400 << 20, 120 << 20, 2500 << 20
# Versions that the store holds at once: the newest, the one before it, and the one that is written (or its spare file).
STORED = 3


@dataclass(frozen=True, slots=True)
class ModelSize:
    """parameters: tied ones once. kv_values: keys and values of one token, of all layers."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_values: int

    @classmethod
    def read(cls, directory: Path) -> ModelSize:
        """From the headers of its weights, and its config.json. Raises: ModelNotFound."""
        values = kv_values(directory)
        layers, hidden, inner = (
            setting(directory, n) or 0 for n in ("num_hidden_layers", "hidden_size", "intermediate_size")
        )
        shapes = tensor_shapes(directory)
        if setting(directory, "tie_word_embeddings") and len(shapes) > 1:
            shapes.pop("lm_head.weight", None)
        parameters = sum(math.prod(shape) for shape in shapes.values())
        return cls(parameters, layers, hidden, inner or 4 * hidden, vocab_size(directory), values)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one process on its device, and in the machine's memory beside it (the same, where it is the CPU)."""

    device: str
    on_device: int
    in_memory: int

    @property
    def cpu(self) -> int:
        return self.in_memory + (self.on_device if self.device == "cpu" else 0)


def needs(config: Config, model: ModelSize) -> dict[str, Need]:
    """By process, what it needs at its largest."""
    trainer, engine = config.trainer, config.engine
    found = {}
    whole, state = 4 * model.parameters, trainer_state(config, model)
    held = sum(state.values()) + activations(config, model)
    on_cpu = trainer.device == "cpu"
    if trainer.sharding == "fsdp":
        # weights and gradients of a layer, the embedding and the head are gathered; before it is sharded it is whole
        layer = 4 * model.hidden**2 + 3 * model.hidden * model.intermediate
        held += 8 * (2 * model.vocabulary * model.hidden + layer)
        held = max(held, whole + state["weights"]) if on_cpu else held
    beside = TORCH_BYTES + (0 if on_cpu else whole)  # it is read into the machine's memory, and goes on from there
    for rank in range(trainer.ranks):
        found[f"trainer-{rank}" if trainer.ranks > 1 else "trainer"] = Need(trainer.device, held, beside)
    own_reference = trainer.lora.rank > 0 and config.reference.path is None
    frozen = whole + trainer.logit_chunk * model.vocabulary * 8
    if config.algorithm.kl_coef > 0 and not own_reference:
        found["reference"] = Need(trainer.device, frozen, beside)
    if config.algorithm.old_logprobs == "recompute":
        found["proximal"] = Need(trainer.device, frozen, beside)
    base = TORCH_BYTES if engine.kind == "local" else VLLM_BYTES
    for index in range(config.engines if not engine.vllm.urls else 0):  # a server that runs already is not ours
        found[f"engine-{index}"] = Need(engine.device, engine_bytes(config, model), base)
    for kind, count in (("rollout", config.runtime.rollout_workers), ("env", config.runtime.env_workers)):
        found |= {f"{kind}-{i}": Need("cpu", 0, PLAIN_BYTES) for i in range(count)}
    return found


def trainer_state(config: Config, model: ModelSize) -> dict[str, int]:
    """What a trainer rank holds between steps and while it takes one: weights, gradients, the optimiser's moments."""
    count, share = trained(config, model), config.trainer.ranks if config.trainer.sharding == "fsdp" else 1
    return {"weights": 4 * model.parameters // share, "gradients": 4 * count // share, "moments": 8 * count // share}


def trained(config: Config, model: ModelSize) -> int:
    """Parameters that are trained: all, or an adapter's, about A and B of a layer's seven matrices."""
    rank = config.trainer.lora.rank
    adapter = model.layers * rank * (8 * model.hidden + 3 * (model.hidden + model.intermediate))
    return adapter if rank else model.parameters


def activations(config: Config, model: ModelSize) -> int:
    """What a pass over one micro-batch keeps for its backward pass, logits included."""
    trainer = config.trainer
    layer = 4 * (11 * model.hidden + 5 * model.intermediate)
    layers = layer * model.layers
    if trainer.activation_checkpointing:
        layers = 4 * model.hidden * model.layers + layer
    # A chunk's logits, their softmax and their gradient: more than one chunk is computed again, one after another.
    return trainer.micro_tokens * layers + 3 * 4 * trainer.logit_chunk * model.vocabulary


def engine_bytes(config: Config, model: ModelSize) -> int:
    """An engine's weights in every slot, and all of its KV cache."""
    engine = config.engine
    dtype = engine.vllm.dtype if engine.kind == "vllm" else "auto"
    wide = 4 if dtype == "float32" or (dtype == "auto" and engine.device == "cpu") else 2
    return wide * (engine.slots * model.parameters + engine.kv_tokens * model.kv_values)


def stored_bytes(config: Config, model: ModelSize) -> int:
    """Published weights that the store holds at once, the stale pool's and an evaluation's included."""
    versions = STORED + (config.rollout.stale_probability > 0) + (config.eval.every > 0)
    base = 4 * model.parameters if config.trainer.lora.rank else 0  # of adapters
    return base + versions * 4 * trained(config, model)


def checkpoint_bytes(config: Config, model: ModelSize) -> int:
    """Checkpoints on disk at once: those that are kept, and the one being written."""
    return (config.trainer.checkpoint_keep + 1) * 12 * trained(config, model)


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken: what the machine has, and no more than the control groups that we are in (of a
    container, a SLURM job) leave. Files that the kernel can drop count as free."""
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers:
            root, limit, used, files = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # the first version of control groups
            root, limit = groups / "memory", "memory.limit_in_bytes"
            used, files = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / own.lstrip("/")
        for place in (group, *group.parents):
            try:
                most, now = (place / limit).read_text().strip(), int((place / used).read_text())
                kept = dict(entry.split() for entry in (place / "memory.stat").read_text().splitlines())
            except OSError:
                continue  # not a group, or one that limits nothing
            if most != "max":
                free = min(free, int(most) - now + int(kept[files]))
    return free


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def listed(needs: Mapping[str, Need]) -> str:
    """The largest first, as "trainer 1.2 GiB, engine-0 0.9 GiB"."""
    largest = sorted(needs.items(), key=lambda item: -(item[1].on_device + item[1].in_memory))
    return ", ".join(f"{name} {gib(n.on_device + n.in_memory)}" for name, n in largest)
