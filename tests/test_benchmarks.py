"""The benchmarks' contract: what a result looks like, what counts as met, when a cell holds; and that they run."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.config import Config
from springtide.rundir import RunDirectory

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are programs, run by path, and import what they share from beside them
common, learning, goodput = (importlib.import_module(name) for name in ("common", "learning", "goodput"))

LETTERS = Path(__file__).parent / "letters.py"
RESULT = {"name", "machine", "commit", "load", "seconds", "quick", "rows"}
ROW = {
    "target", "value", "unit", "baseline", "baseline_value", "ratio", "required", "met", "seeds", "ci_low", "ci_high",
}  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are stored while a test runs."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "CELLS", tmp_path / "cells")
    monkeypatch.setattr(common, "PAGE", tmp_path / "RESULTS.md")
    return tmp_path


def result_of(*rows: Any, quick: bool = False) -> dict[str, Any]:
    with common.Load() as load:
        pass
    return common.report("sample", rows, load, quick=quick)


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_has_the_contracts_fields_and_a_page_of_its_own(kept: Path, capsys: Any) -> None:
    row = common.Row("speed", 3.0, "tokens/s", "theirs", 2.0, required=1.4, judged="ratio", extra={"threads": 1})
    common.emit(result_of(row), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= RESULT
    assert set(printed["rows"][0]) >= ROW | {"threads"}
    assert printed["rows"][0]["ratio"] == 1.5
    assert printed["rows"][0]["met"] is True
    assert json.loads((kept / "results" / "sample.json").read_text()) == printed
    assert "| speed | 3 tokens/s | 2 (theirs) | 1.5 | - | >= 1.4 of ratio | yes |" in (kept / "RESULTS.md").read_text()


def test_a_quick_result_is_neither_met_nor_stored(kept: Path, capsys: Any) -> None:
    result = result_of(common.Row("speed", 3.0, "tokens/s", required=1.0), common.Row("free", 1.0, "s"), quick=True)
    assert [r["met"] for r in result["rows"]] == [False, None]
    common.emit(result, as_json=False)
    assert "counts for nothing" in capsys.readouterr().out
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "met"),
    [
        ({"value": 20.0, "required": 20.0}, True),
        ({"value": 19.9, "required": 20.0}, False),
        ({"value": 25.0, "worst": 19.0, "required": 20.0, "judged": "worst"}, False),
        ({"value": 5000.0, "required": 4096.0, "at_most": True}, False),
        ({"value": 4000.0, "required": 4096.0, "at_most": True}, True),
        ({"value": 5.0, "required": 2.0, "judged": "ratio"}, False),  # no baseline was measured
        ({"value": None, "required": 1.0}, False),
        ({"value": math.nan, "required": 1.0}, False),
        ({"value": 1.0}, None),
    ],
)
def test_what_counts_as_met(row: dict[str, Any], met: bool | None) -> None:
    data = result_of(common.Row("t", unit="x", **row))["rows"][0]
    assert data["met"] is met
    json.dumps(data, allow_nan=False)


def test_the_page_in_the_repository_is_what_the_stored_results_say() -> None:
    assert common.PAGE.read_text() == common.render(), "run: python benchmarks/common.py --render"


def test_intervals_are_students() -> None:
    low, high = common.interval([10.0, 20.0, 30.0])
    assert (low, high) == pytest.approx((20 - 4.303 * 10 / 3**0.5, 20 + 4.303 * 10 / 3**0.5))
    assert common.interval([10.0]) == (None, None)
    low, high = common.ratio_interval([2.0, 4.0], [1.0, 2.0])
    assert (low, high) == pytest.approx((2.0, 2.0))


# --- cells ------------------------------------------------------------------------------------------------------------


def make_package(root: Path) -> None:
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "a.py").write_text('"""Doc."""\nimport os\n\ndef f():\n    from p.b import g\n    return g, "p.c:main"\n')
    (root / "b.py").write_text("from . import d\n\ndef g():\n    return d\n")
    for name in "cde":
        (root / f"{name}.py").write_text(f"{name} = 1\n")


def test_a_cells_sources_are_what_its_entries_import_by_whatever_way(tmp_path: Path) -> None:
    root = tmp_path / "p"
    make_package(root)
    assert set(common.imported(["p.a"], root)) == {"p", "p.a", "p.b", "p.c", "p.d"}
    before = common.fingerprint(["p.a"], root=root)
    (root / "a.py").write_text((root / "a.py").read_text().replace("Doc", "Text") + "# a comment\n")
    (root / "e.py").write_text("e = 2\n")
    assert common.fingerprint(["p.a"], root=root) == before, "neither prose nor a module that is not imported counts"
    (root / "d.py").write_text("d = 2\n")
    changed = common.fingerprint(["p.a"], root=root)
    assert changed != before
    data = tmp_path / "model"
    data.mkdir()
    (data / "weights").write_bytes(b"1")
    first = common.fingerprint(["p.a"], [data], root=root)
    (data / "weights").write_bytes(b"2")
    assert len({changed, first, common.fingerprint(["p.a"], [data], root=root)}) == 3


def test_a_cell_is_used_again_only_as_long_as_it_holds(tmp_path: Path) -> None:
    runs: list[int] = []

    def compute() -> dict[str, Any]:
        runs.append(1)
        return {"success": 0.5, "gap": math.nan}

    cell = common.Cell("x-0", {"lr": 1e-3}, "s")
    first = cell.run(compute, missing=True, directory=tmp_path)
    assert first["result"] == {"success": 0.5, "gap": None}
    assert {"key", "config", "commit", "machine", "load", "seconds"} <= set(first)
    assert cell.run(compute, missing=True, directory=tmp_path) == first
    assert len(runs) == 1
    cell.run(compute, missing=False, directory=tmp_path)
    assert len(runs) == 2
    for other in (common.Cell("x-0", {"lr": 2e-3}, "s"), common.Cell("x-0", {"lr": 1e-3}, "t")):
        assert other.stored(tmp_path) is None
        other.run(compute, missing=True, directory=tmp_path)
    assert len(runs) == 4


def test_cells_of_the_learning_benchmark_tell_seeds_arms_and_rates_apart() -> None:
    cells = [learning.rl_cell(0, ()), learning.rl_cell(1, ()), *learning.tune_cells(()).values()]
    cells += [learning.supervised_cell("learning-supervised-0", 0, f, ()) for f in (1.0, 4.0)]
    assert len({c.key for c in cells}) == len(cells)
    assert learning.rl_cell(0, ()).key == learning.rl_cell(0, ("run.name=x", "observe.progress=false")).key


@pytest.mark.parametrize("program", [learning, goodput])
def test_a_changed_preset_is_a_quick_one(program: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        program.main(["--set", "trainer.lr=1"])
    assert exit_.value.code == 2
    assert "--quick" in capsys.readouterr().err


# --- goodput's arithmetic ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.01, 2), st.sampled_from(["Admitted", "Ready", "Dropped"])), max_size=40))
def test_time_with_nothing_in_flight_is_what_sampling_the_events_finds(moves: list[tuple[float, str]]) -> None:
    events: list[dict[str, Any]] = [{"kind": "StepEnded", "t": 0.0}]
    t, flying, ready = 0.0, [], []
    for number, (delay, kind) in enumerate(moves):
        t += delay
        source = {"Ready": flying, "Dropped": flying or ready}.get(kind)
        if kind == "Admitted":
            flying.append(number)
            events.append({"kind": kind, "t": t, "visit": number})
        elif source:
            visit = source.pop()
            ready += [visit] if kind == "Ready" else []
            events.append({"kind": kind, "t": t, "visit": visit})
    end = t + 1
    events.append({"kind": "StepEnded", "t": end})
    empty, present, last = 0.0, set[int](), 0.0
    for event in events[1:]:
        empty += event["t"] - last if not present else 0.0
        last = event["t"]
        if event["kind"] == "Admitted":
            present.add(event["visit"])
        elif event["kind"] != "StepEnded":
            present.discard(event["visit"])
    assert goodput.empty_share(events) == pytest.approx(empty / end)


# --- the programs, on a tiny model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arms(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """Both arms of the learning benchmark, for three seconds each, and the configuration of rl, whose files stay."""
    directory = tmp_path_factory.mktemp("arms")
    sets = (
        f"model.path={tiny_model}", f'suites=[{{use="{LETTERS}:Letters"}}]', "model.context=256", "run.minutes=0.05",
        "rollout.max_new_tokens=12", "rollout.group.n=4", "trainer.groups=4", "eval.tasks=8", "observe.report=false",
        "trainer.cold_start.tasks=8", "trainer.cold_start.batch=3",
    )  # fmt: skip
    config = common.preset(*sets, f"run.dir={directory}", "run.name=rl")
    rl = learning.train_rl(config, directory, sets)
    return config, rl, asyncio.run(learning.train_supervised(config, directory / "supervised", 3e-3))


def test_both_arms_start_from_the_same_figures_and_report_the_same_kind(arms: Any) -> None:
    config, rl, supervised = arms
    assert rl["start"] == supervised["start"]
    assert rl["start"]["letters"]["episodes"] == rl["end"]["letters"]["episodes"] == 8
    assert supervised["loss_end"] < supervised["loss_start"]
    assert supervised["epochs"] == pytest.approx(supervised["steps"] * 3 / 8)
    assert supervised["train_s"] >= 60 * config.run.minutes
    rows = learning.make_rows([rl, rl], [supervised, supervised])
    table = {row.target: row for row in rows}
    assert table["evaluated episodes a suite, at least"].met(quick=False) is False
    assert table["peak memory, PSS of all processes"].value > 100
    assert table["wall time of the quickstart"].value * 60 > rl["train_s"]
    cell = {"result": rl, "config": {"run": {"seed": 0}}}
    assert len(learning.make_notes({"rl": [cell]})) == 2 + 2


def test_goodputs_figures_of_a_run_and_its_ceiling(arms: Any) -> None:
    config, rl, _ = arms
    run = RunDirectory(config.run_dir)
    figures = goodput.figures(common.read_lines(run.metrics), common.read_lines(run.events), rl["peak_pss_mib"])
    assert 0 < figures.loss_tokens_per_s < figures.all_tokens_per_s
    for shares in (figures.trainer, figures.engine):
        assert all(share >= 0 for share in shares.values())
        assert sum(shares.values()) <= 1.001
    assert {"publish", "groups"} <= set(figures.trainer)
    ceiling = asyncio.run(goodput.replay(config, 0.5))
    assert ceiling > 0
    rows = goodput.make_rows({"asynchronous": [figures], "synchronous": [figures]}, [ceiling])
    with common.Load() as load:
        pass
    result = common.report("goodput", rows, load, quick=True)
    assert all(set(row) >= ROW and not row["met"] for row in result["rows"])
    assert len({row["target"] for row in result["rows"]}) == len(rows)
