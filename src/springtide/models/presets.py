"""Which directory a model's name means: a shipped preset, or any Hugging Face directory.

Called by: the driver, evaluation, the CLI, `doctor`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

SHIPPED = ("springtide-nano",)


class ModelNotFound(Exception):
    """No such model here. The text names what there is."""


def resolve_model(name: str) -> Path:
    """A shipped model by name, or a directory with a `config.json`. Raises: ModelNotFound."""
    directory = Path(str(files("springtide.models") / name)) if name in SHIPPED else Path(name)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(
            f"model.path: {name!r} is neither a directory with a config.json nor a shipped model ({', '.join(SHIPPED)})"
        )
    return directory


def vocab_size(directory: Path) -> int:
    """Rows of the model's embedding, as its configuration says. Raises: ModelNotFound."""
    size = _setting(directory, "vocab_size")
    if size is None:
        raise ModelNotFound(f"{directory}/config.json has no vocab_size")
    return size


def max_positions(directory: Path) -> int | None:
    """Tokens the model can attend over, as its configuration says; None where it does not."""
    return _setting(directory, "max_position_embeddings")


def _setting(directory: Path, name: str) -> int | None:
    try:
        config = json.loads((directory / "config.json").read_text())
        value = config.get(name, config.get("text_config", {}).get(name))
    except (ValueError, AttributeError) as error:
        raise ModelNotFound(f"{directory}/config.json is not a model's configuration: {error}") from None
    return value if isinstance(value, int) else None
