"""Imports go downwards without a cycle, what must start light never imports torch, and no file is too long."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "springtide"
LIGHT = ("schedule", "env", "suites", "chat", "trace", "wire", "config", "ledger", "rundir", "rollout")


def room(module: str) -> str:
    """The package a module belongs to."""
    parts = module.split(".")[1:]
    return parts[0] if parts else "springtide"


def imports(source: Path) -> dict[str, set[str]]:
    """Room -> the rooms its modules import, anywhere in them (also inside functions)."""
    found: dict[str, set[str]] = {}
    for path in source.rglob("*.py"):
        if path.parent == source and path.stem.startswith("__"):
            continue  # the public names, resolved lazily
        here = room(".".join(("springtide", *path.relative_to(source).with_suffix("").parts)))
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                whole = node.module == "springtide"
                names = [f"springtide.{a.name}" for a in node.names] if whole else [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            there = {room(n) for n in names if n.startswith("springtide.") and not n.startswith("springtide.__")}
            found.setdefault(here, set()).update(there - {here})
    return found


def test_packages_import_downwards_without_a_cycle() -> None:
    graph = imports(SOURCE)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle
    assert order.index("trace") < order.index("rollout") < order.index("trainer") < order.index("cli")
    assert graph["trainer"] >= {"observe", "rollout", "ledger"}  # the walk sees what is there


def test_a_cycle_between_packages_is_found_also_inside_a_function(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "rollout" / "feeder.py").write_text("def f():\n    from springtide.trainer.data import Row\n")
    (tmp_path / "trainer" / "data.py").write_text("import springtide.rollout.feeder\n")
    with pytest.raises(CycleError):
        list(TopologicalSorter(imports(tmp_path)).static_order())


def test_what_must_start_light_imports_no_torch() -> None:
    modules = sorted(
        ".".join(("springtide", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).with_suffix("").parts[0] in LIGHT
    )
    assert len(modules) > 40
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_file_is_longer_than_six_hundred_lines() -> None:
    root = SOURCE.parents[1]
    files = [
        path
        for folder in ("src", "tests", "benchmarks", "scripts", "examples")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".c")
    ]
    assert SOURCE / "config.py" in files and Path(__file__).resolve() in files
    lengths = {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 600} == {}
