"""Where processes live, as far as it can be seen without Ray; a role that a rank assumes; what is not there says so."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.run_support import alive, run_config

from springtide.config import ConfigError, make_config
from springtide.engine.protocol import EngineStats
from springtide.process import ProcessFailed
from springtide.runtime import ray as runtime_ray
from springtide.runtime.launch import open_places
from springtide.runtime.ranks import Program, Rank, keep_alive
from springtide.wire import ConnectionLost

HELPERS = "tests.helpers_process"


def test_a_run_on_ray_without_ray_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    config = make_config({"suites": [{"use": "db"}], "runtime": {"kind": "ray"}})

    async def run() -> None:
        async with open_places(config, tmp_path / "run", {"trainer": "trainer"}):
            raise AssertionError("it must not start")

    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r'^runtime\.kind: "ray" needs Ray, .*pip install "springtide\[ray\]"$'):
        asyncio.run(run())
    assert dict(os.environ) == before


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^runtime\.ray\.address: .* is not HOST:PORT of a cluster's head, nor auto$"
    ):
        runtime_ray._need_listener(address)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        runtime_ray._need_listener(address)
    with pytest.raises(ConfigError, match=rf"^runtime\.ray\.address: nothing answers at {address} .*is the head up"):
        runtime_ray._need_listener(address)


def test_a_process_takes_what_its_kind_was_given_and_a_gpu_where_its_device_is_one() -> None:
    tree: dict[str, Any] = {"suites": [{"use": "db"}], "engine": {"device": "cuda"}}
    config = make_config(
        {**tree, "runtime": {"ray": {"resources": {"trainer": {"GPU": 2, "CPU": 4}, "env": {"big": 1, "CPU": 0}}}}}
    )
    bundles = {role: runtime_ray._bundle(config, role) for role in ("rollout", "reference", "trainer", "worker", "env")}
    assert bundles == {
        "rollout": {"CPU": 1, "GPU": 1}, "reference": {"CPU": 1}, "trainer": {"CPU": 4, "GPU": 2},
        "worker": {"CPU": 1}, "env": {"big": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ports": [2000, 1000]}, "no range of ports"),
        ({"ports": [0, 1000]}, "no range of ports"),
        ({"resources": {"env": {"CPU": 0}}}, r"resources\.env: nothing is left"),
        ({"resources": {"boss": {"CPU": 1}}}, "'rollout', 'reference', 'trainer', 'worker' or 'env', not 'boss'"),
        ({"labels": {"boss": {}}}, "'rollout', 'reference', 'trainer', 'worker' or 'env', not 'boss'"),
    ],
)
def test_places_that_cannot_be_are_refused_with_the_configuration(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^runtime\.ray.*{says}"):
        make_config({"suites": [{"use": "db"}], "runtime": {"ray": options}})


# --- roles ------------------------------------------------------------------------------------------------------------


def _rank(tmp_path: Path, **roles: Program) -> Rank:
    return Rank(
        "rank-0", None, {}, log_dir=tmp_path, socket_path=str(tmp_path / "s"), start_s=60.0, restart=True,
        silent_s=30.0, roles=roles,
    )  # fmt: skip


def test_a_rank_has_no_program_until_it_assumes_a_role_and_then_one_at_a_time(tmp_path: Path) -> None:
    rank = _rank(
        tmp_path,
        reference=Program(f"{HELPERS}:echo", {"role": "reference"}, take="take"),
        rollout=Program(f"{HELPERS}:echo", {"role": "rollout"}, take="take"),
    )

    async def run() -> None:
        async with asyncio.timeout(60), keep_alive([rank]):
            with pytest.raises(ConnectionLost, match="rank-0 is down"):
                await rank.call("pid", deadline_s=5)
            with pytest.raises(
                ValueError, match="rank-0 has no program for the role trainer; it has reference, rollout"
            ):
                await rank.assume("trainer", None, deadline_s=5)
            pids = []
            for role, version in (("reference", 3), ("rollout", 4), ("reference", None)):
                await rank.assume(role, version, deadline_s=30)
                assert (await rank.call("args", deadline_s=5)) == {
                    "role": role,
                    **({"took": (version,)} if version else {}),
                }
                pids.append(await rank.call("pid", deadline_s=5))
                assert alive(set(pids)) == {pids[-1]}, "the former role's program has ended"
            await rank.assume("reference", 9, deadline_s=30)
            assert await rank.call("pid", deadline_s=5) == pids[-1], "it holds the role: it only takes the version"
            assert rank.restarts == 0, "a change of roles is no death"
            os.kill(pids[-1], 9)
            answer = await rank.call_again("args", deadline_s=5)
            assert answer == {"role": "reference", "took": (9,)}, "a successor has role and version"
            assert rank.restarts == 1

    asyncio.run(run())


def test_a_role_whose_environment_is_missing_ends_the_run_with_a_line(tmp_path: Path) -> None:
    rank = _rank(tmp_path, rollout=Program(f"{HELPERS}:echo", {}, python=str(tmp_path / "venv/bin/python")))

    async def run() -> None:
        async with asyncio.timeout(30), keep_alive([rank]):
            await rank.assume("rollout", None, deadline_s=20)

    with pytest.raises(ProcessFailed, match=r"^rank-0: there is no interpreter .*venv/bin/python"):
        asyncio.run(run())


def test_a_reference_and_an_engine_in_one_rank_load_and_unload_for_good(tiny_model: Path, tmp_path: Path) -> None:
    """Two real programs: the memory of the one that left is free, and it is the other that computes."""
    store, tree = tmp_path / "store", run_config(tiny_model, tmp_path).model_dump(mode="json")
    given = {"model": str(tiny_model), "store": str(store), "config": tree}
    rank = _rank(
        tmp_path,
        reference=Program("springtide.trainer.rank:main", {**given, "role": "reference"}, take="pull"),
        rollout=Program("springtide.engine.server:main", given, take="load"),
    )

    def resident_mib(pid: int) -> float:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def run() -> None:
        async with asyncio.timeout(100), keep_alive([rank]):
            await rank.assume("reference", None, deadline_s=60)
            assert rank.process is not None
            first = rank.process.pid
            assert (await rank.call("status", deadline_s=5))["ready"]
            assert resident_mib(first) > 100, "it has torch and a model"
            await rank.assume("rollout", None, deadline_s=60)
            assert not Path(f"/proc/{first}").exists()
            assert rank.process is not None and rank.process.pid != first
            stats = await rank.call("stats", deadline_s=5)
            assert isinstance(stats, EngineStats) and stats.kv_tokens == 0

    asyncio.run(run())
