"""A run on a real Ray: it learns and adds up as a local one, outlives what is killed, and leaves nothing behind.

Slow, and skipped where Ray is not installed: `pip install "springtide[ray]"`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Nodes, open_nodes
from tests.run_support import alive, command, descendants, listening, program, records, run_config, start_run, wait_for
from tests.siege import audit

from springtide.config import Config

pytest.importorskip("ray", reason='Ray is not installed: pip install "springtide[ray]"')
pytestmark = pytest.mark.slow


def ray_config(model: Path, runs: Path, *, runtime: dict[str, Any] | None = None, **tables: Any) -> Config:
    """A run whose every member is found by `audit`."""
    tables.setdefault("run", {"steps": 3})
    return run_config(
        model, runs, "on-ray", algorithm={"equal_rewards": "keep"}, trainer={"checkpoint_every": 5},
        runtime={"kind": "ray", **(runtime or {})}, **{"rollout": {"group": {"n": 4, "retries": 0}}, **tables},
    )  # fmt: skip


def began(run: subprocess.Popen[str], config: Config, output: Path, steps: int = 1) -> None:
    def trained() -> bool:
        assert run.poll() is None, output.read_text()
        path = config.run_dir / "metrics.jsonl"
        return path.exists() and sum('"kind": "step"' in line for line in path.read_text().splitlines()) >= steps

    wait_for(f"step {steps}", trained, 180)


def of(run: subprocess.Popen[str], name: str) -> int:
    """The run's process whose log is NAME.log."""
    return wait_for(name, lambda: next((p for p in descendants(run.pid) if program(p) == name), None))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


def test_a_run_on_a_ray_of_its_own_adds_up_listens_on_loopback_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    low = 21000 + os.getpid() % 30000
    config = ray_config(
        tiny_model, tmp_path / "runs", run={"steps": 40},
        runtime={"rollout_workers": 2, "ray": {"object_store_mb": 90, "ports": [low, low + 60]}},
    )  # fmt: skip
    output, home = tmp_path / "out", tmp_path / "home"
    home.mkdir()
    run = start_run(config, output=output, env={**os.environ, "HOME": str(home)})
    began(run, config, output)
    pids = {run.pid, *descendants(run.pid)}
    ours = {p for p in pids if program(p) in ("engine-0", "rollout-0", "rollout-1", "trainer", "env-w0")}
    assert len(ours) == 5
    assert all("ray::Host" in " ".join(command(parent(p))) for p in ours), "each under an actor of its own"
    assert len({parent(p) for p in ours}) == 5
    heard = {address.rpartition(":")[0] for address in listening(pids).values()} - {""}
    assert heard and heard <= LOOPBACK
    ports = [int(address.rpartition(":")[2], 16) for address in listening(ours).values() if address != "unix"]
    assert len(ports) == 5 and all(low <= port <= low + 60 for port in ports), "each within the range of ports"
    (raylet,) = (p for p in pids if "raylet/raylet" in command(p)[0])
    assert any(re.search(rf"object_store_memory={90 << 20}$", part) for part in command(raylet))
    scratches = {m for p in pids for m in re.findall(r"/tmp/springtide-\w+", " ".join(command(p)))}
    assert scratches and all(map(os.path.isdir, scratches))
    assert run.wait(240) == 0, output.read_text()
    audit(config)
    wait_for("the end of every process", lambda: not alive(pids), within_s=15)
    wait_for("the end of its files", lambda: not any(map(os.path.exists, scratches)), within_s=10)
    assert not (home / ".ray").exists() and [p for p in config.run_dir.rglob(".*") if p.name != ".lock"] == []


@pytest.mark.parametrize("what", ["program", "actor", "stopped actor"])
@pytest.mark.parametrize("victim", ["engine-0", "rollout-0", "env-w0", "reference"])
def test_a_killed_program_or_actor_is_replaced_and_nothing_is_lost(
    tiny_model: Path, tmp_path: Path, victim: str, what: str
) -> None:
    steps = 150 if "stopped" in what else 60  # until it is killed, its program goes on
    config = ray_config(tiny_model, tmp_path, run={"steps": steps}, runtime={"silent_s": 5})
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.01})})
    output = tmp_path / "out"
    run = start_run(config, output=output)
    began(run, config, output, 3)
    pid = of(run, victim)
    os.kill(pid if what == "program" else parent(pid), signal.SIGSTOP if "stopped" in what else signal.SIGKILL)
    wait_for("its end", lambda: not alive({pid}), within_s=40)
    wait_for("its successor", lambda: any(program(p) == victim for p in alive(descendants(run.pid))), within_s=60)
    assert run.poll() is None, output.read_text()
    assert run.wait(300) == 0, output.read_text()
    audit(config)
    lost = {name: n for r in records(config) for name, n in r["restarts"].items()}
    assert lost == ({} if victim == "reference" else {victim if victim != "env-w0" else "env": 1})
    said = "answered nothing for 5 s" if "stopped" in what else "actor died" if what == "actor" else "status -9"
    assert said in output.read_text()


def test_a_killed_trainer_ends_the_run_and_a_killed_driver_leaves_nothing_and_it_goes_on_elsewhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = ray_config(tiny_model, tmp_path, run={"steps": 30})
    output = tmp_path / "out"
    run = start_run(config, output=output)
    began(run, config, output, 6)
    pids = descendants(run.pid)
    os.kill(of(run, "trainer"), signal.SIGKILL)
    assert run.wait(60) == 1 and "trainer ended with status -9" in output.read_text()
    wait_for("the end of every process", lambda: not alive(pids), within_s=15)
    run = start_run(config, resume=True, output=output)
    wait_for("a step", lambda: max((r["step"] for r in records(config)), default=0) >= 12 or run.poll(), 180)
    pids = descendants(run.pid)
    scratches = {m for p in pids for m in re.findall(r"/tmp/springtide-\w+", " ".join(command(p)))}
    os.kill(run.pid, signal.SIGKILL)
    wait_for("the end of every process", lambda: not alive(pids), within_s=15)
    wait_for("the end of its files", lambda: not any(map(os.path.exists, scratches)), within_s=15)
    local = config.model_copy(update={"runtime": config.runtime.model_copy(update={"kind": "local"})})
    run = start_run(local, resume=True, output=output)  # where it runs is no part of what it learns
    assert run.wait(240) == 0, output.read_text()
    audit(local)


# --- a cluster --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with open_nodes() as cluster:
        yield cluster


def on_cluster(config: Config, nodes: Nodes, output: Path) -> subprocess.Popen[str]:
    return start_run(config, output=output, env=nodes.env)


def test_a_killed_node_is_replaced_by_others_and_nothing_is_lost(
    tiny_model: Path, tmp_path: Path, nodes: Nodes
) -> None:
    nodes.add("head", 4, labels={"pool": "learn"})
    nodes.add("first", 4, labels={"pool": "play"})
    nodes.add("second", 4, labels={"pool": "play"})
    play = {"pool": "play"}
    config = ray_config(
        tiny_model, tmp_path / "runs", run={"steps": 150},
        runtime={"ray": {"address": nodes.address, "labels": {
            "trainer": {"pool": "learn"}, "rollout": play, "worker": play, "env": play
        }}},
    )  # fmt: skip
    output = tmp_path / "out"
    run = on_cluster(config, nodes, output)
    began(run, config, output, 3)
    playing = {"engine-0", "rollout-0", "env-w0"}
    (held,) = (name for name in ("first", "second") if playing <= nodes.holds(name))  # PACK
    assert "trainer" in nodes.holds("head")
    assert list(config.run_dir.glob("springtide-on-ray-*")), "weights lie where all nodes see them"
    nodes.kill(held)
    other = ({"first", "second"} - {held}).pop()
    wait_for("the successors on the other node", lambda: playing <= nodes.holds(other), within_s=90)
    assert run.wait(400) == 0, output.read_text()
    audit(config)
    assert "actor died" in output.read_text()


def test_a_killed_head_ends_the_run_by_name_and_it_goes_on_without_a_cluster(
    tiny_model: Path, tmp_path: Path, nodes: Nodes
) -> None:
    nodes.add("head", 8)
    config = ray_config(tiny_model, tmp_path / "runs", run={"steps": 200}, runtime={"ray": {"address": nodes.address}})
    output = tmp_path / "out"
    run = on_cluster(config, nodes, output)
    began(run, config, output, 6)
    nodes.kill("head")
    assert run.wait(150) != 0  # Ray itself ends its driver, which waited a minute for the head
    assert "GCS may have been killed" in output.read_text()
    local = config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": 210}),
            "runtime": config.runtime.model_copy(update={"kind": "local"}),
        }
    )
    run = start_run(local, resume=True, output=output)
    assert run.wait(240) == 0, output.read_text()
    audit(local)


def ended(config: Config, nodes: Nodes, tmp_path: Path) -> tuple[int, str]:
    """Status and last words of a run that cannot start."""
    output = tmp_path / "out"
    run = on_cluster(config, nodes, output)
    return run.wait(120), output.read_text().strip().splitlines()[-1]


def test_what_a_cluster_lacks_is_one_line_in_time(tiny_model: Path, tmp_path: Path, nodes: Nodes) -> None:
    nodes.add("head", 4)
    where = {"address": nodes.address}
    for more, says in (
        (
            {"resources": {"trainer": {"CPU": 64}}},
            r"did not give the run its places within 8 s: it needs 67 CPU \(free: ",
        ),
        ({"resources": {"rollout": {"GPU": 1}}}, r"needs 4 CPU .*, 1 GPU \(free: 0\).*rollout 1 CPU, 1 GPU"),
        ({"labels": {"trainer": {"gpu": "h100"}}}, r"with labels \{'trainer': \{'gpu': 'h100'\}\}"),
        ({"strategy": "STRICT_SPREAD"}, "did not give the run its places"),
    ):
        config = ray_config(tiny_model, tmp_path / "runs", runtime={"start_s": 8, "ray": {**where, **more}})
        status, said = ended(config, nodes, tmp_path)
        assert status != 0 and re.search(says, said), said
    # the version that the head says it has
    script = (
        "import ray, json; ray.init(address='auto', log_to_driver=False);"
        "k = ray._private.worker.global_worker.gcs_client;"
        "v = json.loads(k.internal_kv_get(b'CLUSTER_METADATA', b'cluster')); v['ray_version'] = '2.1.0';"
        "k.internal_kv_put(b'CLUSTER_METADATA', json.dumps(v).encode(), True, b'cluster')"
    )
    env = {**nodes.env, "RAY_ADDRESS": nodes.address}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)
    status, said = ended(ray_config(tiny_model, tmp_path / "runs", runtime={"ray": where}), nodes, tmp_path)
    assert status == 2
    assert re.search(r"runtime\.ray\.address: no connection to .*Version mismatch.*Ray: 2\.1\.0", said), said


def test_a_node_that_does_not_see_the_runs_directory_is_named(tiny_model: Path, tmp_path: Path, nodes: Nodes) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to hide a directory from one node")
    nodes.add("head", 8)
    shared = tmp_path / "runs"
    shared.mkdir()
    hide = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {shared} && exec "$@"', "sh")
    nodes.add("blind", 8, inside=hide)
    config = ray_config(tiny_model, shared, runtime={"ray": {"address": nodes.address}})
    status, said = ended(config, nodes, tmp_path)
    assert status == 2
    assert re.search(rf"run\.dir: node 127\.0\.0\.\d+ does not see {config.run_dir}; on several nodes run\.dir", said)
