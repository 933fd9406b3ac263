"""benchmarks/frontier.py: what it pairs and counts, and the pool of mixed levels that it plays."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from springtide.ledger import Outcome

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "benchmarks"))
frontier, mixed = (importlib.import_module(name) for name in ("frontier", "mixed"))


def cell(share: float, held_out: float) -> dict[str, Any]:
    end = {"db": {"sampled": held_out}, "kg": {"sampled": held_out + 0.2}}
    return {"result": {"all": {"mixed": share}, "later": {"mixed": share / 2}, "end": end}}


def test_samplers_are_compared_with_uniform_seed_by_seed_and_only_where_both_are() -> None:
    cells = {
        "frontier-uniform-0": cell(0.2, 0.1), "frontier-frontier-0": cell(0.5, 0.1),
        "frontier-uniform-1": cell(0.4, 0.3), "frontier-frontier-1": cell(0.5, 0.2),
        "frontier-frontier-2": cell(0.9, 0.9), "frontier-thompson-2": cell(0.9, 0.9),
    }  # fmt: skip
    rows = {row.target: row for row in frontier.make_rows(cells)}
    assert set(rows) == {f"frontier ahead of uniform: {what}" for what in frontier.FIGURES}
    share = rows["frontier ahead of uniform: mixed groups, all"]
    assert (share.value, share.seeds) == (pytest.approx(20.0), 2)
    assert share.ci_low is not None and share.ci_low < 20 < share.ci_high
    assert dict(share.extra) == pytest.approx({"frontier": 50.0, "uniform": 30.0})
    assert rows["frontier ahead of uniform: held-out success, sampled"].value == pytest.approx(-5.0)


def test_a_group_is_mixed_if_some_members_won_and_some_did_not() -> None:
    wins = [0, 1, 3, 4]
    said = frontier.summarise([Outcome(i, "s", "t", w, 4, 0.5) for i, w in enumerate(wins)])
    assert said == {"groups": 4, "mixed": 0.5, "success": 0.5}


def test_arms_differ_by_the_sampler_alone_and_share_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    jobs = frontier.plan(frontier.Size(seeds=1))
    assert len({job.cell.key for job in jobs}) == len(jobs)
    trees = [{k: v for k, v in job.cell.config.items() if k != "program"} for job in jobs]
    kinds = [tree["rollout"].pop("sampling").pop("kind") for tree in trees]
    assert kinds == list(frontier.KINDS) and all(tree == trees[0] for tree in trees)
    assert trees[0]["algorithm"]["equal_rewards"] == "keep" and trees[0]["run"]["seed"] == 0


@pytest.mark.parametrize("suite", ["DB", "KG", "HOUSE"])
def test_the_mixed_pool_holds_each_level_equally_and_each_task_is_found_by_its_reference(suite: str) -> None:
    pool = getattr(mixed, suite)
    for split in ("train", "test"):
        tasks = pool.select(split, "mixed")
        assert Counter(t.level for t in tasks) == {level: mixed.EACH for level in mixed.LEVELS}
        assert all(pool.task(task.ref).id == task.id for task in tasks)
        assert Counter(t.level for t in tasks[:8]) == {level: 2 for level in mixed.LEVELS}
