"""Which directory a model's name means: a shipped preset, or any Hugging Face directory.

Called by: the driver, evaluation, the CLI, `doctor`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

# What the local engine runs (`models.decoder`).
ARCHITECTURES = ("Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
VLLM = 'what the local engine does not run, engine.kind = "vllm" may (docs/vllm.md)'
# GPT-2's words and MPT's, for a config.json's usual ones.
_ALSO = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
SHIPPED = {"springtide-nano": 512}  # name -> tokens an episode may reach in its evaluation, as in the quickstart


class ModelNotFound(Exception):
    """No such model here, or one that cannot be used. One line: what is wrong, and what there is or would do."""


def resolve_model(name: str, *, key: str = "model.path") -> Path:
    """A shipped model by name, or a directory with a `config.json`. Raises: ModelNotFound."""
    directory = Path(str(files("springtide.models") / name)) if name in SHIPPED else Path(name)
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelNotFound(f"{key}: {name!r} is an adapter, no model; merge it: springtide export {name} DIR")
        raise ModelNotFound(
            f"{key}: {name!r} is neither a directory with a config.json nor a shipped model ({', '.join(SHIPPED)})"
        )
    return directory


def vocab_size(directory: Path) -> int:
    """Rows of the model's embedding, as its configuration says. Raises: ModelNotFound."""
    size = setting(directory, "vocab_size")
    if size is None:
        raise ModelNotFound(f"{directory}/config.json has no vocab_size")
    return size


def max_positions(directory: Path) -> int | None:
    """Tokens the model can attend over, as its configuration says; None where it does not."""
    return setting(directory, "max_position_embeddings")


def kv_values(directory: Path) -> int:
    """Keys and values of one token, of all layers, as the usual attention has them. Raises: ModelNotFound."""
    layers, heads, hidden = (setting(directory, n) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if layers is None or not heads or hidden is None:
        raise ModelNotFound(
            f"{directory}/config.json does not tell its attention: num_hidden_layers, num_attention_heads, hidden_size"
        )
    dim = setting(directory, "head_dim") or hidden // heads
    return 2 * layers * (setting(directory, "num_key_value_heads") or heads) * dim


def setting(directory: Path, name: str) -> int | None:
    """A whole number of the model's config.json by its usual name, None where it has none. Raises: ModelNotFound."""
    try:
        config = json.loads((directory / "config.json").read_text())
        tables = (config, config.get("text_config") or {})
        found = (table.get(key) for table in tables for key in (name, *_ALSO.get(name, ())))
        value = next((value for value in found if value is not None), None)
    except (ValueError, AttributeError) as error:
        raise ModelNotFound(f"{directory}/config.json is not a model's configuration: {error}") from None
    return value if isinstance(value, int) else None


def check_architecture(directory: Path) -> None:
    """Whether the local engine knows the model, before anything starts. Raises: ModelNotFound."""
    try:
        name = json.loads((directory / "config.json").read_text())["architectures"][0]
    except (ValueError, KeyError, TypeError, IndexError):
        return  # said by who reads the file whole
    if name not in ARCHITECTURES:
        raise ModelNotFound(f"model.path: {directory} is a {name}; known: {', '.join(ARCHITECTURES)}; {VLLM}")


def check_weights(directory: Path) -> None:
    """Read the headers of the model's safetensors files, and compare their shapes with its configuration.

    For the architectures the engine runs; no tensor is read. Raises: ModelNotFound, with the file and the first fault.
    """
    shapes = tensor_shapes(directory)
    try:
        wanted = _expected_shapes(json.loads((directory / "config.json").read_text()))
    except (KeyError, TypeError) as error:
        raise ModelNotFound(f"{directory}/config.json does not describe a decoder: {error!r} is missing") from None
    for name, expected in wanted.items():
        if name not in shapes:
            raise ModelNotFound(f"{directory}: the weights lack {name}, which config.json wants; copy the model again")
        if shapes[name] != expected:
            raise ModelNotFound(
                f"{directory}: {name} is {shapes[name]} in the weights and {expected} by config.json; "
                "they belong to different models"
            )


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Tensor -> shape, from the headers of a model's safetensors files. Raises: ModelNotFound."""
    index, shapes = directory / "model.safetensors.index.json", dict[str, list[int]]()
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotFound(f"{index} is not an index of weights: {error!r}; copy the model again") from None
    for name in names:
        shapes |= _shapes(directory / name)
    return shapes


def _shapes(file: Path) -> dict[str, list[int]]:
    """Tensor -> shape, from a safetensors file's header."""
    try:
        with open(file, "rb") as reader:
            length, size = int.from_bytes(reader.read(8), "little"), file.stat().st_size
            header: Any = json.loads(reader.read(length)) if 0 < length <= size - 8 else None
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: list(entry["shape"]) for name, entry in entries.items()}
        ends = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise ModelNotFound(f"{file}: {error.strerror or error}; a model's weights are safetensors files") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelNotFound(f"{file} is not a safetensors file, or is torn; copy the model again") from None
    if 8 + length + ends != size:
        raise ModelNotFound(f"{file} is torn: {size} bytes, its header says {8 + length + ends}; copy the model again")
    return shapes


def _expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """What the tensors of a decoder the engine runs must measure; empty for others, which the engine names itself."""
    kind = (config.get("architectures") or [""])[0]
    gemma = kind == "Gemma3ForCausalLM"
    if kind not in ARCHITECTURES:
        return {}
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or (256 if gemma else hidden // heads)
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    more = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if gemma else ()
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("self_attn.q_proj", [queries, hidden]),
            ("self_attn.k_proj", [keys, hidden]),
            ("self_attn.v_proj", [keys, hidden]),
            ("self_attn.o_proj", [hidden, queries]),
            ("mlp.gate_proj", [inner, hidden]),
            ("mlp.up_proj", [inner, hidden]),
            ("mlp.down_proj", [hidden, inner]),
            ("input_layernorm", [hidden]),
            ("post_attention_layernorm", [hidden]),
            *((name, [hidden]) for name in more),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes
