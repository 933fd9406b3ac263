"""Two evaluations compared task by task: by hand, under the null hypothesis, and from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from springtide.cli.main import app
from springtide.config import ConfigError
from springtide.observe.compare import compare, read_scores, sign_flip


def scores(**tasks: float) -> dict:
    return {("db", "sampled"): tasks}


def test_a_difference_by_hand():
    (row,) = compare(scores(t1=0, t2=0, t3=1, t4=0), scores(t1=1, t2=1, t3=1, t4=0))
    assert (row.a, row.b, row.difference, row.tasks) == (0.25, 0.75, 0.5, 4)
    # differences 1, 1, 0, 0: deviation sqrt(1/3), error sqrt(1/3)/2 = 0.288675
    assert row.high - row.difference == pytest.approx(1.959964 * 0.288675, rel=1e-4)
    assert row.p == 0.5  # of the 4 signings of two ones, ++ and -- reach 2


def test_only_shared_tasks_count_and_the_others_are_said():
    (row,) = compare(scores(t1=0, t2=1, t9=1), scores(t1=1, t2=1, t7=0, t8=0))
    assert (row.tasks, row.only_a, row.only_b, row.difference) == (2, 1, 2, 0.5)
    with pytest.raises(ConfigError, match="share no task"):
        compare(scores(t1=0), scores(t2=0))


def test_the_mean_over_suites_weighs_them_alike():
    a = {("db", "sampled"): {"t1": 0.0, "t2": 0.0, "t3": 1.0}, ("kg", "sampled"): {"u": 0.0, "v": 1.0}}
    b = {("db", "sampled"): {"t1": 1.0, "t2": 1.0, "t3": 1.0}, ("kg", "sampled"): {"u": 0.0, "v": 1.0}}
    mean = compare(a, b)[-1]
    assert mean.suite == "mean" and mean.difference == pytest.approx((2 / 3 + 0) / 2)
    assert mean.tasks == 5


def test_sign_flips_by_hand():
    assert sign_flip(np.array([1.0, 1.0, 1.0])) == 0.25
    assert sign_flip(np.zeros(9)) == 1.0
    assert sign_flip(np.ones(40)) == pytest.approx(1 / 20_001)


@pytest.mark.parametrize("n", [12, 30])
def test_equal_policies_are_told_apart_no_more_often_than_the_level_says(n):
    rng = np.random.default_rng(3)
    found = [sign_flip((rng.random(n) < 0.5) * 1.0 - (rng.random(n) < 0.5)) for _ in range(200)]
    assert np.mean(np.array(found) < 0.05) < 0.09  # 0.05 and three standard errors
    assert np.mean(np.array(found) < 0.5) > 0.3  # and it does reject at weaker levels: it is not always 1


def write_run(path: Path, label: str, won: dict[str, list[bool | None]], temperature: float = 1.0) -> None:
    (path / "evaluations").mkdir(parents=True, exist_ok=True)
    rows = [
        {"suite": "db", "task": task, "sample": i, "temperature": temperature, "success": ok}
        for task, oks in won.items()
        for i, ok in enumerate(oks)
    ]
    (path / "evaluations" / f"{label}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_runs_and_files_are_read_and_environment_errors_are_in_neither(tmp_path: Path):
    write_run(tmp_path / "a", "end", {"t1": [True, False], "t2": [None]})
    assert read_scores(tmp_path / "a", "end") == {("db", "sampled"): {"t1": 0.5}}
    lines = (tmp_path / "a" / "evaluations" / "end.jsonl").read_text().splitlines()
    (tmp_path / "out.json").write_text(json.dumps({"episodes": [json.loads(line) for line in lines]}))
    assert read_scores(tmp_path / "out.json", "end") == read_scores(tmp_path / "a", "end")
    write_run(tmp_path / "b", "end", {"t1": [True]}, temperature=0.0)
    assert read_scores(tmp_path / "b", "end") == {("db", "greedy"): {"t1": 1.0}}


def test_the_command_prints_a_line_a_suite_and_bad_input_is_one_line(tmp_path: Path):
    for name, second in (("a", False), ("b", True)):
        write_run(tmp_path / name, "end", {"t1": [True], "t2": [second], "t3": [second]})
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0 and "33.3% -> 100.0%" in done.output and "p 0.5" in done.output
    found = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert found["rows"][0]["difference"] == pytest.approx(2 / 3)
    for source, says in (
        (tmp_path / "nowhere", "there is no run and no file"),
        (tmp_path, "is it a run with evaluations"),
        (tmp_path / "a" / "evaluations" / "end.jsonl", "no run directory and no file of springtide eval"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_scores(source, "end")
    with pytest.raises(ConfigError, match="it has end: choose one with --label"):
        read_scores(tmp_path / "a", "start")
