"""Configuration: every fault is one line that names the key, and what is resolved reads back equal."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from springtide.config import RESUMABLE, Config, ConfigError, changed_keys, load_config, make_config

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
        (("schedule.policy=magic",), r"schedule\.policy: .*'synchronous', 'one_step_off'"),
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
        (("run.seed=9223372036854775808",), r"run\.seed: .*9223372036854775807, not 9223372036854775808"),
        (("trainer.betas=[0.9, 1.0]",), r"trainer\.betas\.1: .*less than 1, not 1\.0"),
        (("trainer.betas=[-0.1, 0.9]",), r"trainer\.betas\.0: .*greater than or equal to 0"),
        (("trainer.lr=1e300",), r"trainer\.lr: .*less than or equal to 10, not 1e\+300"),
        (("engine.max_batch=1000000000",), r"engine\.max_batch: .*16384"),
        (("engine.kv_tokens=1000000000000",), r"engine\.kv_tokens: .*100000000, not"),
        (("rollout.temperature=1e-320",), r"rollout\.temperature: .*0\.001, not 1e-320"),
        (("rollout.temperature=0",), r"rollout\.temperature: .*0\.001, not 0"),
        (('run.dir="a\\u0000b"',), r"run\.dir: 'a\\x00b' holds a NUL"),
        (('suites=[{use="a\\u0000b.py:X"}]',), r"suites\.0\.use: 'a\\x00b\.py:X' holds a NUL"),
        ((f"run.name={'x' * 300}",), r"run\.name: .*more than 240 bytes"),
        ((f"run.steps={'9' * 5000}",), r"--set 'run\.steps=9+.*: .*digits"),
        ((f"suites={'[' * 20000}",), r"--set 'suites=\[+"),
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
        *tables, name = key.split(".")
        assert name in functools.reduce(dict.__getitem__, tables, full), key


def test_every_number_is_bounded_on_both_sides() -> None:
    """What is finite but absurd passed the check and ended in a library's traceback later."""

    def numbers(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if node.get("type") in ("integer", "number"):
            yield node
        for part in (*node.get("anyOf", ()), *node.get("prefixItems", ())):
            yield from numbers(part)

    found = [
        (f"{table}.{name}", number)
        for table, definition in Config.model_json_schema()["$defs"].items()
        for name, field in definition["properties"].items()
        for number in numbers(field)
    ]
    assert len(found) > 40
    sides = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
    assert [name for name, number in found if not all(side & number.keys() for side in sides)] == []


def test_a_number_that_python_does_not_write_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^run\.steps: .*, not such a int$"):
        make_config({**SUITES, "run": {"steps": 10**5000}})
