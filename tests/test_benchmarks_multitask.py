"""benchmarks/multitask.py: what is paired, what the statistics say, how the program stops; and its arms, for real."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.conftest import make_tiny_model

from run_support import alive, descendants, wait_for

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are programs, run by path, and import what they share from beside them
common, runs, multitask, table = (
    importlib.import_module(n) for n in ("common", "runs", "multitask", "multitask_table")
)

LETTERS = f"{Path(__file__).parent / 'letters.py'}:Letters"
# What makes QUICK quick enough for a test, given a tiny model.
TINY = (
    f'suites=[{{use="{LETTERS}"}}]', "model.context=256", "rollout.max_new_tokens=12", "trainer.groups=2",
    "rollout.group.n=4", "eval.tasks=4",
)  # fmt: skip
COUNT = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda c: [min(c), max(c)])


# --- statistics -------------------------------------------------------------------------------------------------------


@given(COUNT, COUNT, st.sampled_from([1, 2, 4]))
def test_half_of_the_episodes_from_each_is_the_mean_over_all_ways_to_choose_them(
    first: list[int], second: list[int], k: int
) -> None:
    halves = [(k // 2, k // 2)] if k > 1 else [(1, 0), (0, 1)]
    chances = []
    for parts in halves:
        ways = [
            list(itertools.combinations([True] * wins + [False] * (played - wins), part))
            for (wins, played), part in zip((first, second), parts, strict=True)
        ]
        if not all(ways):
            chances.append(None)
            continue
        chances.append(fmean(any(a + b) for a, b in itertools.product(*ways)))
    expected = None if None in chances else fmean(chances)
    assert table.mixed(first, second, k) == (None if expected is None else pytest.approx(expected))


def test_a_detectable_effect_is_found_four_times_in_five() -> None:
    assert table.detectable([1.0]) is None
    draws = np.random.default_rng(0).standard_normal((20_000, 8))
    one = draws[0]
    scale = table.detectable((one / one.std(ddof=1)).tolist())  # of a deviation of exactly 1
    assert scale == pytest.approx((2.365 + 0.896) / 8**0.5)
    shifted = draws + scale
    t = shifted.mean(1) / (shifted.std(1, ddof=1) / 8**0.5)
    assert (abs(t) > 2.365).mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("published", "values", "said"),
    [
        (4.3, [4.0, 5.0, 4.5], "agrees: inside"),
        (4.3, [9.0, 9.5, 9.2], "same direction"),
        (4.3, [-3.0, -3.1, -2.9], "the opposite direction"),
        (4.3, [0.1, -0.1, 0.0], "our interval holds 0"),
        (4.3, [4.0, -3.0, 5.0], "neither"),
        (4.3, [4.0], "one seed"),
    ],
)
def test_agreement_with_the_paper_follows_from_the_interval(published: float, values: list[float], said: str) -> None:
    assert said in table.agreement(published, values)
    assert ("disagrees" in table.agreement(published, values)) == ("opposite" in said or "holds 0" in said)
    clear = common.interval(values)[0] is not None and not table.agreement(0.0, values).startswith(("agrees", "told"))
    assert table.direction(1, values) == (
        "not told apart from 0" if not clear else "agrees" if values[0] > 0 else "**disagrees**: the opposite direction"
    )


# --- rows, from cells -------------------------------------------------------------------------------------------------


def cell(success: dict[str, float], groups: dict[str, int] | None = None) -> dict[str, Any]:
    result: dict[str, Any] = {"end": {s: {"sampled": v, "greedy": v + 0.1} for s, v in success.items()}}
    if groups is not None:
        result |= {"groups": groups, "steps": 2, "loss_tokens": 100, "train_s": 60.0}
    return {"result": result}


def some_cells() -> dict[str, dict[str, Any]]:
    return {
        **{f"start-{s}": cell({"a": 0.2, "b": 0.4}) for s in (0, 1)},
        **{f"multi-{s}": cell({"a": 0.6, "b": 0.7 + s / 10}, {"a": 4, "b": 4}) for s in (0, 1)},
        **{f"only-x-{s}": cell({"a": 0.5, "b": 0.3}, {"a": 4}) for s in (0, 1)},  # named as it was given
        "only-b-0": cell({"a": 0.1, "b": 0.9}, {"b": 4}),
        **{f"full-{s}": cell({"a": 0.5, "b": 0.5}, {}) for s in (0, 1, 2)},
        **{f"nocross-{s}": cell({"a": 0.4, "b": 0.5 - s / 10}, {}) for s in (0, 1)},
    }


def test_only_what_is_whole_is_compared() -> None:
    cells = some_cells()
    assert table.whole_seeds(cells) == [0]  # seed 1 lacks a specialist
    assert table.paired_seeds(cells, "nocross") == [0, 1]
    rows = {r.target: r for r in table.make_rows(cells)}
    assert not any("normalisation" in target or "pass@" in target for target in rows)
    own = rows["multi-task ahead of specialists, each on its own suite: mean sampled success"]
    assert own.value == pytest.approx(((60 - 50) + (70 - 90)) / 2)
    assert rows["multi-task: gain over the start, mean sampled"].value == pytest.approx(65 - 30)
    assert rows["specialists: gain over the start on their own suite"].value == pytest.approx((30 + 50) / 2)
    assert rows["specialists: change from the start on the other suites"].value == pytest.approx((-10 - 10) / 2)
    assert rows["specialists on all suites, ahead of multi-task"].value == pytest.approx((40 + 50) / 2 - 65)
    cross = rows["full ahead of without cross-policy sampling: mean sampled success"]
    assert cross.extra["by_seed"] == pytest.approx([5, 10])
    assert cross.seeds == 2
    assert rows["full ahead of without cross-policy sampling: detectable effect, 80% power"].value == pytest.approx(
        table.detectable([5.0, 10.0])
    )
    assert all(r.required is None and r.met(quick=False) is None for r in rows.values())
    cells["only-b-1"] = cell({"a": 0.1, "b": 0.9}, {"b": 4})
    assert table.whole_seeds(cells) == [0, 1]
    notes = "\n".join(table.make_notes(cells, ["nonorm-0"]))
    assert "nonorm-0" in notes
    assert "| what cross-policy sampling is worth | +4.3 (Table 6) | +7.5 (" in notes
    assert "| full | 3 | 50.0 / 60.0 | 50.0 / 60.0 | 50.0 / 60.0 | 2 | 100 | 1.0 |" in notes


def test_rows_of_crossed_policies_are_over_tasks_against_the_better_one() -> None:
    wins = {
        "first": {"a": [[4, 4], [0, 4]], "b": [[2, 4]]},
        "second": {"a": [[0, 4], [0, 4]], "b": [[0, 4]]},
        "cross": {"a": [[4, 4], [4, 4]], "b": [[1, 4]]},
    }
    cells = {"passk-p": {"result": {"wins": wins}}}
    rows = {r.target: r for r in table.make_rows(cells)}
    assert set(rows) == {
        f"p: pass@{k} of cross ahead of {other}"
        for k in (1, 4)
        for other in ("the better policy alone", "half of the episodes from each")
    }
    assert rows["p: pass@1 of cross ahead of the better policy alone"].value == pytest.approx((0 + 100 - 25) / 3)
    assert rows["p: pass@4 of cross ahead of half of the episodes from each"].value == pytest.approx(
        100 * (0 + 1 + 1 / 6) / 3
    )
    notes = "\n".join(table.make_notes(cells))
    assert "| p: pass@1 of cross against the better policy alone | slightly below (Fig. 8) | +25.0" in notes
    assert "| b | half from each | 25.0 | 50.0 | 83.3 |" in notes


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs() -> list[Any]:
    return multitask.plan(multitask.Size())


def test_every_prefix_of_the_plan_holds_whole_pairs_of_all_seeds_but_its_last(jobs: list[Any]) -> None:
    names = [j.cell.name.removeprefix("multitask-") for j in jobs]
    keys = {j.cell.key for j in jobs}
    assert len(set(names)) == len(keys) == len(jobs) == 8 + 3 * 8 + 4 * 3 + 2
    seeds = [int(n.rpartition("-")[2]) for n in names if not n.startswith("passk")]
    assert seeds == sorted(seeds)
    for pair, policies in multitask.PAIRS.items():  # a pair comes when its policies are trained
        trained = names[: names.index(f"passk-{pair}")]
        assert all(p is None or f"{p[0]}-{p[1]}" in trained for p in policies)


def test_arms_differ_in_what_they_are_named_for_and_get_equal_groups_a_suite(jobs: list[Any]) -> None:
    trees = {j.cell.name.removeprefix("multitask-"): j.cell.config for j in jobs}

    def differing(a: Any, b: Any, prefix: str = "") -> set[str]:
        if isinstance(a, dict) and isinstance(b, dict):
            return set().union(*(differing(a[k], b[k], f"{prefix}.{k}".lstrip(".")) for k in a.keys() | b.keys()))
        return set() if a == b else {prefix}

    assert differing(trees["full-3"], trees["nocross-3"]) == {"rollout.stale_probability"}
    assert differing(trees["full-3"], trees["nonorm-3"]) == {"algorithm.task_norm"}
    assert differing(trees["full-3"], trees["full-4"]) == {"run.seed"}
    assert differing(trees["multi-0"], trees["only-kg-0"]) == {"suites", "run.steps"}
    assert [s["use"] for s in trees["only-kg-0"]["suites"]] == ["kg"]
    multi, own = trees["multi-1"], [trees[f"only-{s}-1"] for s in ("db", "kg", "household")]
    assert len(multi["suites"]) == len(own) == 3
    assert {multi["run"]["steps"] / 3} == {c["run"]["steps"] for c in own}
    assert all(c["eval"] == multi["eval"] and c["evaluated"] == ["db", "kg", "household"] for c in own)


def fake_jobs(seconds: float = 0.0) -> tuple[list[Any], list[str]]:
    ran: list[str] = []

    def job(name: str, minutes: float) -> Any:
        def compute(_: Path) -> dict[str, Any]:
            ran.append(name)
            return {"n": 1}

        return multitask.Job(common.Cell(f"multitask-{name}", {"n": name}, "s"), compute, minutes)

    return [job("long-0", 2.0), job("short-0", 1.0), job("long-1", 9.0), job("short-1", 1.0)], ran


def test_a_program_with_minutes_starts_what_fits_and_skips_no_cell_for_a_later_one(tmp_path: Path) -> None:
    jobs, ran = fake_jobs()
    jobs[2] = multitask.Job(common.Cell("multitask-huge-1", {}, "s"), jobs[2].compute, 9.0)
    cells, lacking = multitask.run_jobs(jobs, tmp_path, missing=True, minutes=5.0)
    assert ran == ["long-0", "short-0"]
    assert (list(cells), lacking) == (["long-0", "short-0"], ["huge-1", "short-1"])
    cells, lacking = multitask.run_jobs(jobs, tmp_path, missing=True, minutes=5.0, only="short")
    assert ran == ["long-0", "short-0", "short-1"]
    assert (list(cells), lacking) == (["long-0", "short-0", "short-1"], ["huge-1"]), (
        "stored ones are used, wanted or not"
    )
    assert multitask.run_jobs(jobs, tmp_path, missing=True, minutes=0.0)[0].keys() == cells.keys()


def test_what_a_cell_takes_is_learned_from_those_of_its_kind(tmp_path: Path) -> None:
    jobs, _ = fake_jobs()
    multitask.run_jobs(jobs[:1], tmp_path, missing=True)
    file = tmp_path / "multitask-long-0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": 240.0}))
    assert multitask.expected_minutes(jobs[2], tmp_path) == 4.0
    assert multitask.expected_minutes(jobs[1], tmp_path) == 1.0


def test_a_cell_that_is_interrupted_is_not_there(tmp_path: Path) -> None:
    jobs, _ = fake_jobs()
    broken = multitask.Job(
        common.Cell("multitask-broken-0", {}, "s"), lambda _: (_ for _ in ()).throw(KeyboardInterrupt), 1
    )
    with pytest.raises(KeyboardInterrupt):
        multitask.run_jobs([jobs[0], broken, jobs[1]], tmp_path, missing=True)
    assert [p.name for p in tmp_path.iterdir()] == ["multitask-long-0.json"]


def test_it_measures_only_the_sources_beside_it(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(multitask, "SOURCES", tmp_path / "src" / "springtide")
    with pytest.raises(SystemExit) as exit_:
        multitask.main(["--quick"])
    assert exit_.value.code == 2
    assert f"PYTHONPATH={tmp_path / 'src'}" in capsys.readouterr().err


def test_a_changed_preset_is_a_quick_one(capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        multitask.main(["--set", "trainer.lr=1"])
    assert exit_.value.code == 2
    assert "--quick" in capsys.readouterr().err


# --- for real, on tiny models -----------------------------------------------------------------------------------------


def test_crossed_episodes_draw_from_two_models_and_the_others_from_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    drawn: list[tuple[Any, Any]] = []
    published: list[dict[str, Any]] = []

    async def play_once(pool: Any, spec: Any, **more: Any) -> Any:
        summary = await original(pool, spec, **more)
        drawn.append((spec, summary))
        return summary

    async def publish(runtime: Any, version: int) -> None:
        await runs.publish(runtime, version)
        published.append(json.loads((runtime.weights / str(version) / "fingerprint.json").read_text())["tensors"])

    original = runs.play_once
    monkeypatch.setattr(runs, "play_once", play_once)
    monkeypatch.setattr(multitask, "publish", publish)
    size = multitask.Size(sets=(*TINY, f"model.path={tiny_model}"))
    config = multitask.configure(size, 0, "eval.samples=8", "rollout.stale_probability=0.5")
    wins = asyncio.run(multitask.count_wins(config, (tiny_model, other), tmp_path / "run"))["wins"]
    assert {arm: [played for _, played in wins[arm]["letters"]] for arm in wins} == dict.fromkeys(wins, [8] * 4)
    for tensors, model in zip(published, (tiny_model, other), strict=True):
        weights = load_file(model / "model.safetensors")
        assert all(weights[n].sum(dtype=np.float64) == pytest.approx(p["sum"]) for n, p in tensors.items())
    arms = {"first": drawn[:32], "second": drawn[32:64], "cross": drawn[64:]}
    stale = {arm: sum(len(s.stale_steps) for _, s in of) for arm, of in arms.items()}
    assert (stale["first"], stale["second"]) == (0, 0)
    assert 4 < stale["cross"] < 28, "one turn an episode, each of 32 by a coin"
    assert len({spec.seed for spec, _ in drawn}) == 96, "no two episodes share their seed"


@pytest.mark.slow
def test_the_cells_of_one_seed_run_and_make_the_table(tiny_model: Path, tmp_path: Path) -> None:
    sets = (*TINY, f"model.path={tiny_model}")
    size = multitask.Size(2, 1, 1, 1, 2, 2, sets)
    wanted = ("start-0", "multi-0", "only-letters-0", "passk-start-end")
    jobs = [j for j in multitask.plan(size) if j.cell.name.removeprefix("multitask-") in wanted]
    cells, lacking = multitask.run_jobs(jobs, tmp_path, missing=True)
    assert not lacking
    multi = cells["multi-0"]["result"]
    assert multi["steps"] == 2
    assert multi["groups"] == {"letters": 4}
    assert multi["loss_tokens"] > 0
    assert multi["end"]["letters"]["episodes"] == 4 * 4
    assert cells["passk-start-end"]["result"]["models"][1] == multi["model"], "the policy the cell trained"
    assert multi["model"] != cells["passk-start-end"]["result"]["models"][0]
    assert len(list((tmp_path / "models").iterdir())) == 2
    again, _ = multitask.run_jobs(jobs, tmp_path, missing=True)
    assert again == cells
    targets = [r.target for r in table.make_rows(cells)]
    assert targets[0].startswith("multi-task ahead of specialists")
    assert targets[-1].startswith("start-end: pass@")
    page = common.render(tmp_path / "none", tmp_path)
    assert "| multitask-multi-0 | " in page
    assert f"sampled to {multi['end']['letters']['sampled']:.1%}" in page


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_sigterm_leaves_nothing(tiny_model: Path, tmp_path: Path, part: str) -> None:
    """In a training, which is a process of its own, and in an evaluation, whose processes are ours."""
    # Steps that do not end, or evaluations that do not.
    more = "eval.tasks=4" if part == "train" else "eval.samples=10000"
    sets = (*TINY, f"model.path={tiny_model}", more)
    args = [part_ for item in sets for part_ in ("--set", item)]
    only = "full" if part == "train" else "start"
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import multitask, dataclasses; "
        "multitask.QUICK = dataclasses.replace(multitask.QUICK, short=10**6); multitask.main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--quick", "--only", only, *args],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        started = wait_for("its processes", lambda: len(p := descendants(process.pid)) >= 4 and p)
        time.sleep(3)
        family = started | descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "go on with --missing" in said
    wait_for("them to end", lambda: not alive(family), 20)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("springtide")] == []
