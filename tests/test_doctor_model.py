"""`springtide doctor model`: a good model passes every check; each kind of broken one fails the check that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from springtide.cli.main import app
from springtide.models.presets import ModelNotFound, resolve_model
from springtide.trainer.model import Policy

NANO = resolve_model("springtide-nano")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NANO, tmp_path / "model"))


def examine(path: Path, *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = CliRunner().invoke(app, ["doctor", "model", str(path), "--json", *args])
    assert done.stdout, done.exception
    return done.exit_code, {v["check"]: v for v in json.loads(done.stdout)}


def test_the_shipped_model_passes_every_check() -> None:
    code, found = examine(NANO, "--env", "household", "--level", "quick")
    assert code == 0
    assert {name: v["verdict"] for name, v in found.items()} == dict.fromkeys(found, "ok"), found
    assert len(found) == 9 and "8 solutions of household, level quick" in found["gold"]["detail"]


def test_the_lines_for_people_end_with_a_count() -> None:
    done = CliRunner().invoke(app, ["doctor", "model", "springtide-nano"])
    assert done.exit_code == 0 and done.stdout.rstrip().endswith("9 checks: 1 skipped")


def test_no_model_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "model", str(tmp_path)])
    assert isinstance(done.exception, ModelNotFound) and "PATH" in str(done.exception)


def test_a_template_without_tools_fails_on_its_files_or_its_template(model: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (model / "chat_template.jinja").write_text(plain)
    code, found = examine(model)
    assert code == 1 and {v["verdict"] for n, v in found.items() if n in ("files", "template")} & {"failed"}, found


def test_a_tokenizer_that_is_larger_than_the_model_fails_and_the_rest_of_the_text_is_still_checked(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    code, found = examine(model)
    assert code == 1 and found["files"]["verdict"] == "failed" and "vocab" in found["files"]["detail"]
    assert found["template"]["verdict"] == "ok" and found["log-probs"]["verdict"] == "skipped"


def test_an_architecture_the_engine_does_not_run_is_checked_as_text(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    code, found = examine(model)
    assert code == 0 and found["files"]["verdict"] == "warning" and "gelu" in found["files"]["detail"]
    assert found["tool calls"]["verdict"] == "ok" and found["gradients"]["verdict"] == "skipped"


def test_an_engine_and_a_trainer_that_differ_are_told_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's forward pass is made to differ, as a wrong rotary base or norm in one of the two would."""
    honest = Policy.score
    monkeypatch.setattr(Policy, "score", lambda self, ids: honest(self, ids) * 1.01)
    code, found = examine(model)
    assert code == 1 and found["log-probs"]["verdict"] == "failed" and "nats" in found["log-probs"]["detail"]


def test_weights_that_are_not_finite_are_found(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, found = examine(model)
    assert "failed" in {v["verdict"] for v in found.values()} or "not finite" in found["files"]["detail"], found
    assert "not finite" in found["files"]["detail"] and code in (0, 1)
