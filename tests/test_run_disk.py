"""A disk that is really full, at each thing a run writes: one clear line, nothing lost, and on it goes with room."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.run_support import run_config, start_run, wait_for
from tests.siege import audit

from springtide.config import Config
from springtide.observe.sinks import read_records


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Use up the last byte of it; the file to remove."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    return filler


def lies_on(disk: Path, run: Path, what: str) -> None:
    """Let this part of the run's directory lie on the small disk."""
    target = disk / what
    run.mkdir(exist_ok=True)
    if "." not in what:
        target.mkdir()
    (run / what).symlink_to(target)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param("run", "make room"),
        pytest.param("checkpoints", "cannot write checkpoint .*make room there", marks=pytest.mark.slow),
        pytest.param("trajectories", r"cannot write .*\.msgpack: .*make room there", marks=pytest.mark.slow),
        pytest.param("metrics.jsonl", "cannot write the run's files: .*No space", marks=pytest.mark.slow),
        pytest.param("events.jsonl", "cannot write the run's files: .*No space", marks=pytest.mark.slow),
        pytest.param("ledger.sqlite", "cannot write the run's files: .*full", marks=pytest.mark.slow),
        pytest.param("weights", "cannot publish .*make room there", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_one_line_loses_nothing_and_the_run_goes_on_with_room(
    tiny_model: Path, tmp_path: Path, disk: Path, what: str, says: str
) -> None:
    def config(steps: int) -> Config:
        return run_config(
            tiny_model, disk if what == "run" else tmp_path, run={"steps": steps}, algorithm={"equal_rewards": "keep"},
            trainer={"checkpoint_every": 2}, weights={"dir": str(disk)} if what == "weights" else {},
        )  # fmt: skip

    def refused(run: subprocess.Popen[str]) -> None:
        assert run.wait(120) == 1
        assert run.stdout is not None
        said = run.stdout.read()
        lines = [line for line in said.splitlines() if line.startswith("springtide:")]
        assert len(lines) == 1 and "Traceback" not in said, said
        assert re.search(says, lines[0]) and "--resume" in lines[0], said

    directory = config(1).run_dir
    if what not in ("run", "weights"):
        lies_on(disk, directory, what)
    run = start_run(config(500))
    wait_for("a step", lambda: any(r["step"] for r in read_records(directory / "metrics.jsonl")), within_s=120)
    filler = fill(disk)
    refused(run)
    refused(start_run(config(500), resume=True))  # still full
    filler.unlink()
    steps = max(r["step"] for r in read_records(directory / "metrics.jsonl")) + 3
    again = start_run(config(steps), resume=True)
    assert again.wait(120) == 0, again.stdout and again.stdout.read()
    audit(config(steps))
    assert not [path for path in directory.rglob(".*") if path.name != ".lock"]
