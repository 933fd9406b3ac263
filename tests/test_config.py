"""Configuration: every fault is one line that names the key, and what is resolved reads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.config import RESUMABLE, ConfigError, changed_keys, load_config, make_config

SUITES = {"suites": [{"use": "db"}, {"use": "kg"}]}


def test_sets_change_tables_and_list_entries(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[suites]]\nuse = "db"\n[trainer]\nlr = 1e-3\n')
    config = load_config(file, ("trainer.lr=2e-4", "suites.0.level=standard", "run.name=abc", "rollout.group.n=4"))
    assert (config.trainer.lr, config.suites[0].level, config.run.name) == (2e-4, "standard", "abc")
    assert config.rollout.group.n == 4


def test_the_resolved_tree_reads_back_equal(tmp_path: Path) -> None:
    config = make_config({**SUITES, "trainer": {"lr": 3e-4}, "run": {"minutes": 2.5}})
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("trainer.learning_rate=1",), r"trainer\.learning_rate: no such key in trainer"),
        (("trainer.lr=-1",), r"trainer\.lr: .*greater than 0.*-1"),
        (("run.steps=many",), r"run\.steps: .*integer.*'many'"),
        (("schedule.policy=magic",), r"schedule\.policy: .*'synchronous' or 'fixed_split'"),
        (("rollout.group.n=1",), r"rollout\.group\.n: .*at least 2"),
        (("rollout.group.min_members=9",), r"min_members: more than rollout\.group\.n"),
        (("algorithm.weight_cap=2.0",), r'old_logprobs = "recompute"'),
        (("rollout.stale_probability=0.2", "engine.weight_slots=2"), "weight_slots >= 3"),
        (("engine.kv_tokens=100",), r"kv_tokens: 100 is less than model\.context"),
        (("suites.0.use=kg",), "names one twice"),
        (("schedule.policy=synchronous", "runtime.rollout_workers=2"), "rollout_workers = 1"),
        (("trainer.lr",), "write it as table.key=value"),
        (("suites.7.level=x",), r"suites\.7 is not an entry"),
        (("run.name=a/b",), r"run\.name"),
    ],
)
def test_faults_are_one_line_with_key_and_remedy(tmp_path: Path, sets: tuple[str, ...], says: str) -> None:
    """verl#1929, verl#2621, NeMo-RL#2325: configuration faults found late or not at all."""
    file = tmp_path / "c.toml"
    file.write_text('[[suites]]\nuse = "db"\n[[suites]]\nuse = "kg"\n')
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(file, sets)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="suites: name at least one"):
        make_config({})


def test_changes_are_found_by_key() -> None:
    new = make_config({**SUITES, "run": {"steps": 7}, "eval": {"every": 3}})
    assert changed_keys(make_config(SUITES), new) == {"run.steps", "eval.every"}


def test_resumable_keys_exist() -> None:
    full = make_config(SUITES).model_dump()
    for key in RESUMABLE:
        table, name = key.split(".")
        assert name in full[table], key
