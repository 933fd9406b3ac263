"""Finding suites by name: an installed entry point, `FILE.py:Class` of one's own, or a file of data.

Invariants: importing this loads no suite; a missing one is one line that lists those available.
Called by: the CLI, environment workers, the checker.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

from springtide.env.environment import Environment
from springtide.env.suite import Suite, SuiteError

GROUP = "springtide.suites"
DATA_SUFFIXES = (".toml", ".jsonl", ".parquet")


def available_suites() -> tuple[str, ...]:
    """The names of the installed suites."""
    return tuple(sorted(point.name for point in importlib.metadata.entry_points(group=GROUP)))


def load_suite(name: str) -> Suite:
    """The suite `name`: an entry point of the group `springtide.suites`, `FILE.py:Class`, or a data set's file (see
    `env.dataset`). Raises: SuiteError."""
    if "\0" in name:
        raise SuiteError(f"suite {name!r}: its name holds a NUL character, which no path can")
    path, separator, attribute = name.rpartition(":")
    if separator and path.endswith(".py"):
        return _as_suite(load_file(Path(path).resolve(), name), attribute, name)
    if name.endswith(DATA_SUFFIXES):
        from springtide.env.dataset import dataset_suite

        return dataset_suite(name)
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            try:
                value = point.load()
            except ImportError as error:
                raise SuiteError(f"suite {name} cannot be imported ({error}); install springtide[suites]") from error
            return value if isinstance(value, Suite) else Suite.of(value)
    raise SuiteError(
        f"no suite {name!r}; there are {', '.join(available_suites())}, or give FILE.py:Class, or a file of data"
    )


def load_file(path: Path, name: str) -> Any:
    """A file of Python as a module, once a process; `name`: the suite that needs it. Raises: SuiteError."""
    if not path.is_file():
        raise SuiteError(f"suite {name}: there is no file {path}")
    module_name = f"springtide_suite_{path.stem}_{abs(hash(str(path))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and type hints of the file look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # none of them may end its importer
        del sys.modules[module_name]
        raise SuiteError(f"suite {name}: {path.name} fails on import: {type(error).__name__}: {error}") from error
    return module


def _as_suite(module: Any, attribute: str, name: str) -> Suite:
    value = getattr(module, attribute, None)
    if isinstance(value, Suite):
        return value
    if isinstance(value, type) and issubclass(value, Environment):
        return Suite.of(value)
    classes = [
        n
        for n, v in vars(module).items()
        if isinstance(v, type) and issubclass(v, Environment) and v is not Environment
    ]
    raise SuiteError(f"suite {name}: the file has no environment {attribute!r}; it has {', '.join(classes) or 'none'}")
