"""Every option can be set, is read, and changes what happens (verl#7430, SkyRL#2246: keys that could not be set, flags
that one branch ignored)."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from tests.conftest import make_tiny_model
from tests.run_support import TESTS, records, run_config
from tests.trainer_parts import config as trainer_config
from tests.trainer_parts import tiny_model as trainer_model
from tests.trainer_parts import write_groups

import springtide
from springtide.chat import load_chat
from springtide.config import Config, ConfigError, load_config
from springtide.engine.local.engine import EngineSettings
from springtide.engine.protocol import Generation, Sampling
from springtide.env.inprocess import InProcessClient
from springtide.ledger import Ledger
from springtide.observe.sinks import open_sinks
from springtide.process import ProcessFailed
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary, play
from springtide.rollout.feeder import Feeder, Versions
from springtide.runtime.ranks import Pool
from springtide.schedule.events import Dropped, Event, RankJoined, event_from_json
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import make_policy
from springtide.schedule.sampling import UniformSampler
from springtide.trace import Group, TaskRef, Trajectory
from springtide.trainer.rank import Rank

SOURCE = Path(springtide.__file__).parent
FRONTIER = ("centre", "width", "candidates", "explore", "cooldown", "retire_after")
# Every option, and a test that fails if it is ignored. Options of one value (`fabric.mode`, say) change nothing yet.
SHOWN_BY = {
    "run.name": "test_what_cannot_run_is_refused_before_anything_starts",
    "run.dir": "test_options_of_a_run_take_effect",
    "run.seed": "test_the_seed_decides_what_is_drawn_and_sampled",
    "run.steps": "test_reward_rises_and_the_record_adds_up",
    "run.minutes": "test_options_of_a_run_take_effect",
    "model.path": "test_options_of_a_run_take_effect",
    "model.tool_format": "test_the_tool_format_can_be_forced",
    "model.context": "test_limits_of_an_episode_take_effect",
    "engine.ranks": "test_options_of_the_loop_take_effect",
    "engine.max_batch": "test_engine_sizes_reach_the_engine",
    "engine.kv_tokens": "test_engine_sizes_reach_the_engine",
    "engine.prefill_chunk": "test_engine_sizes_reach_the_engine",
    "engine.weight_slots": "test_engine_sizes_reach_the_engine",
    "engine.device": "test_engine_sizes_reach_the_engine",
    "engine.kind": "test_a_run_plays_on_vllm_and_learns_from_its_tokens",
    "engine.vllm.python": "test_a_run_whose_environment_cannot_serve_is_refused_before_it_starts",
    "engine.vllm.urls": "test_a_stale_pool_is_one_more_engine_and_evaluations_need_no_slot",
    "engine.vllm.dtype": "test_sizes_and_options_reach_the_server_and_its_own_arguments_win",
    "engine.vllm.args": "test_sizes_and_options_reach_the_server_and_its_own_arguments_win",
    "engine.vllm.start_s": "test_a_url_where_nobody_answers_is_said_at_once",
    "runtime.rollout_workers": "test_options_of_the_loop_take_effect",
    "runtime.env_workers": "test_options_of_the_loop_take_effect",
    "runtime.start_s": "test_waiting_for_a_worker_has_the_configured_deadline",
    "runtime.kind": "test_a_run_on_a_ray_of_its_own_adds_up_listens_on_loopback_and_leaves_nothing",
    "runtime.ray.address": "test_a_killed_node_is_replaced_by_others_and_nothing_is_lost",
    "runtime.ray.object_store_mb": "test_a_run_on_a_ray_of_its_own_adds_up_listens_on_loopback_and_leaves_nothing",
    "runtime.ray.strategy": "test_what_a_cluster_lacks_is_one_line_in_time",
    "runtime.ray.ports": "test_a_run_on_a_ray_of_its_own_adds_up_listens_on_loopback_and_leaves_nothing",
    "runtime.ray.resources": "test_a_process_takes_what_its_kind_was_given_and_a_gpu_where_its_device_is_one",
    "runtime.ray.labels": "test_a_killed_node_is_replaced_by_others_and_nothing_is_lost",
    "runtime.pace.device": "test_a_paced_run_keeps_to_the_roofline_and_says_by_how_much_it_does_not",
    "runtime.pace.model": "test_a_training_step_takes_the_time_of_its_passes",
    "runtime.pace.tensor_parallel": "test_a_rank_stands_for_its_roles_devices_and_a_calibration_holds_nothing_back",
    "runtime.pace.trainer_devices": "test_a_rank_stands_for_its_roles_devices_and_a_calibration_holds_nothing_back",
    "runtime.pace.recompute": "test_a_rank_stands_for_its_roles_devices_and_a_calibration_holds_nothing_back",
    "runtime.pace.scale": "test_an_engines_turns_take_the_time_of_their_steps",
    "runtime.silent_s": "test_a_stopped_engine_is_named_while_it_is_silent_and_then_replaced",
    "suites": "test_options_of_a_run_take_effect",
    "rollout.temperature": "test_limits_of_an_episode_take_effect",
    "rollout.max_new_tokens": "test_limits_of_an_episode_take_effect",
    "rollout.max_turns": "test_limits_of_an_episode_take_effect",
    "rollout.concurrency": "test_options_of_a_run_take_effect",
    "rollout.group.n": "test_a_trained_group_holds_exactly_what_was_sampled",
    "rollout.group.min_members": "test_a_member_that_hangs_for_ever_does_not_stop_its_group",
    "rollout.group.retries": "test_retries_are_made_at_once_as_often_as_configured",
    "rollout.group.deadline_s": "test_a_member_that_hangs_for_ever_does_not_stop_its_group",
    "rollout.sampling.kind": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.ema": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.centre": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.width": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.candidates": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.explore": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.cooldown": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.retire_after": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.pass_rates": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.pass_low": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.sampling.pass_high": "test_every_option_of_sampling_changes_what_is_drawn",
    "rollout.stale_probability": "test_stale_turns_are_drawn_at_their_share_from_the_pool_and_counted_apart",
    "rollout.stale_refresh": "test_stale_turns_are_drawn_at_their_share_from_the_pool_and_counted_apart",
    "staleness.bound": "test_no_bound_is_ever_passed_and_every_run_goes_on",
    "staleness.overage": "test_under_drop_a_group_that_grew_too_old_is_given_up_and_counted",
    "schedule.policy": "test_a_synchronous_run_repeats_bit_for_bit_and_is_on_policy",
    "rollout.environments": "test_a_run_opens_no_more_environments_than_it_may",
    "observe.events": "test_a_record_of_groups_alone_is_small_and_says_what_was_trained",
    "trainer.inflight": "test_no_more_forward_passes_run_ahead_than_are_allowed",
    "reference.pipeline": "test_a_loaded_reference_is_in_memory_only_where_it_is_resident",
    "trainer.lend": "test_a_trainer_rank_plays_while_it_waits_and_comes_home",
    "schedule.strict": "test_an_invalid_action_is_an_error_when_strict_and_counted_when_not",
    "algorithm.advantage": "test_advantage_options_change_the_advantages",
    "algorithm.divide_by_std": "test_advantage_options_change_the_advantages",
    "algorithm.task_norm": "test_advantage_options_change_the_advantages",
    "algorithm.equal_rewards": "test_advantage_options_change_the_advantages",
    "algorithm.incomplete_reward": "test_advantage_options_change_the_advantages",
    "algorithm.clip_low": "test_options_of_the_step_change_the_weights",
    "algorithm.clip_high": "test_options_of_the_step_change_the_weights",
    "algorithm.dual_clip": "test_options_of_the_step_change_the_weights",
    "algorithm.old_logprobs": "test_options_of_the_loop_take_effect",
    "algorithm.loss": "test_gspo_clips_a_sequence_as_a_whole_and_at_its_own_defaults",
    "algorithm.correction": "test_corrections_by_hand",
    "algorithm.correction_level": "test_corrections_by_hand",
    "algorithm.weight_cap": "test_truncated_weight_is_capped_and_has_no_gradient",
    "algorithm.weight_floor": "test_corrections_by_hand",
    "algorithm.kl_coef": "test_options_of_a_run_take_effect",
    "algorithm.kl_estimator": "test_kl_by_hand",
    "algorithm.kl_in": "test_options_of_the_loop_take_effect",
    "algorithm.entropy_coef": "test_options_of_the_loop_take_effect",
    "algorithm.aggregation": "test_options_of_the_step_change_the_weights",
    "trainer.groups": "test_reward_rises_and_the_record_adds_up",
    "trainer.micro_tokens": "test_options_of_the_step_change_the_weights",
    "trainer.optimizer": "test_options_of_the_step_change_the_weights",
    "trainer.lr": "test_options_of_the_step_change_the_weights",
    "trainer.warmup": "test_options_of_the_step_change_the_weights",
    "trainer.lr_decay": "test_options_of_the_loop_take_effect",
    "trainer.weight_decay": "test_options_of_the_step_change_the_weights",
    "trainer.betas": "test_options_of_the_step_change_the_weights",
    "trainer.grad_clip": "test_options_of_the_step_change_the_weights",
    "trainer.logit_chunk": "test_logits_never_exist_for_more_than_a_chunk_of_tokens",
    "trainer.checkpoint_every": "test_options_of_a_run_take_effect",
    "trainer.checkpoint_keep": "test_options_of_a_run_take_effect",
    "trainer.device": "test_the_device_reaches_the_trainer",
    "trainer.ranks": "test_a_run_of_two_trainer_ranks_learns_and_adds_up",
    "trainer.sharding": "test_a_rank_that_holds_its_rows_only_is_smaller_by_the_others",
    "trainer.param_dtype": "test_bfloat16_is_computed_with_and_float32_kept",
    "trainer.reduce_dtype": "test_bfloat16_is_computed_with_and_float32_kept",
    "trainer.activation_checkpointing": "test_activation_checkpointing_computes_layers_twice_and_changes_nothing",
    "trainer.cold_start.steps": "test_options_of_the_loop_take_effect",
    "trainer.cold_start.tasks": "test_options_of_the_loop_take_effect",
    "trainer.cold_start.batch": "test_a_cold_start_is_deterministic_and_leaves_a_fresh_optimiser",
    "trainer.cold_start.lr": "test_a_cold_start_is_deterministic_and_leaves_a_fresh_optimiser",
    "trainer.lora.rank": "test_only_the_adapter_is_trained_and_the_merged_model_is_published",
    "trainer.lora.alpha": "test_the_adapters_forward_by_hand",
    "trainer.lora.targets": "test_targets_name_layers_by_the_end_of_their_names",
    "reference.path": "test_options_of_a_run_take_effect",
    "weights.update_at": "test_under_episode_a_whole_episode_keeps_its_version",
    "weights.dir": "test_an_environments_error_discards_its_tokens_by_name_and_a_users_directory_is_kept",
    "eval.every": "test_evaluation_beside_training_is_pinned_to_its_version",
    "eval.tasks": "test_options_of_a_run_take_effect",
    "eval.split": "test_a_synchronous_run_accounts_for_every_token_and_says_when_all_is_cut",
    "eval.samples": "test_options_of_a_run_take_effect",
    "eval.greedy": "test_options_of_a_run_take_effect",
    "eval.at_ends": "test_options_of_a_run_take_effect",
    "eval.dev": "test_options_of_a_run_take_effect",
    "observe.progress": "test_options_of_a_run_take_effect",
    "observe.tensorboard": "test_options_of_a_run_take_effect",
    "observe.wandb": "test_a_sink_that_is_not_installed_is_refused_before_the_run",
    "observe.report": "test_options_of_a_run_take_effect",
}


def leaves(table: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> field, for every option."""
    found: dict[str, Any] = {}
    for name, field in table.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            found |= leaves(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def only_one_value(field: Any) -> bool:
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


OPTIONS = {key: field for key, field in leaves(Config).items() if not only_one_value(field)}


def test_every_option_is_shown_by_a_test_that_exists() -> None:
    assert set(SHOWN_BY) == set(OPTIONS)
    written = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    assert {name for name in SHOWN_BY.values() if f"def {name}(" not in written} == set()


def test_every_option_is_read_by_the_program() -> None:
    """A dead option: `schedule.strict` was one."""
    read: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name != "config.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value)  # a table that is passed as a tree
    assert {key for key in OPTIONS if key.rpartition(".")[2] not in read} == set()


@pytest.mark.parametrize("key", [k for k in OPTIONS if k != "suites"])
def test_every_option_can_be_set_on_the_command_line(tmp_path: Path, key: str) -> None:
    """verl#7430: seven real fields could not be overridden because a file lacked them."""
    field = OPTIONS[key]
    recompute, vllm = "algorithm.old_logprobs=recompute", ("engine.kind=vllm", "engine.vllm.python=p")
    others = {
        "engine.kind": vllm[1:],
        "engine.vllm.python": vllm[:1],
        "engine.vllm.urls": vllm[:1],
        **{f"engine.vllm.{name}": vllm for name in ("dtype", "args", "start_s")},
        "algorithm.weight_cap": (recompute,),
        "algorithm.correction_level": (recompute,),
        "algorithm.weight_floor": (recompute, "algorithm.correction=mask"),
        "rollout.sampling.pass_low": ("rollout.sampling.pass_rates=f",),
        "rollout.sampling.pass_high": ("rollout.sampling.pass_rates=f",),
        **{f"rollout.sampling.{name}": ("rollout.sampling.kind=frontier",) for name in FRONTIER},
        "trainer.lend": ("schedule.policy=springtide",),
        "reference.pipeline": ("algorithm.kl_coef=0.1",),
        "trainer.param_dtype": ("trainer.sharding=fsdp",),
        "trainer.reduce_dtype": ("trainer.sharding=fsdp",),
    }.get(key, ())
    value = _another(key, field)
    (tmp_path / "c.toml").write_text('[[suites]]\nuse = "db"\n')
    config: Any = load_config(tmp_path / "c.toml", (*others, f"{key}={_toml(value)}"))
    for part in key.split("."):
        config = getattr(config, part)
    assert config == (tuple(value) if isinstance(value, list) else value) != field.default


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def _another(key: str, field: Any) -> Any:
    """A valid value that is not the default."""
    default, kinds = field.default, get_args(field.annotation)
    special = {
        "engine.vllm.urls": ["http://host:8000"],
        "runtime.ray.ports": [1024, 2048],
        "runtime.ray.resources": {"rollout": {"CPU": 2.0}},
        "runtime.ray.labels": {"trainer": {"zone": "a"}},
    }
    if key in special:
        return special[key]
    if get_origin(field.annotation) is Literal:
        return next(v for v in kinds if v != default)
    if default is None:
        return "elsewhere" if str in kinds else 0.5 if float in kinds else 2
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2 + 0.13 if key != "algorithm.dual_clip" else 2.5
    if isinstance(default, tuple):
        return ["other"] if not default or isinstance(default[0], str) else [0.5, 0.6]
    return "other"


# --- runs ------------------------------------------------------------------------------------------------------------


def test_options_of_a_run_take_effect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine, other = make_tiny_model(tmp_path / "mine"), make_tiny_model(tmp_path / "other", seed=1)
    suites = [
        {"use": f"{TESTS / 'letters.py'}:Letters", "weight": 3.0},
        {"use": f"{TESTS / 'talk.py'}:NoSleepers", "split": "test"},
    ]
    config = run_config(
        mine, tmp_path / "elsewhere", "many", suites=suites,
        run={"minutes": 0.1, "steps": 100_000}, algorithm={"kl_coef": 0.01, "equal_rewards": "keep"},
        reference={"path": str(other)}, rollout={"concurrency": 3, "max_turns": 2},
        trainer={"checkpoint_every": 1, "checkpoint_keep": 3},
        eval={"at_ends": True, "dev": True, "tasks": 3, "samples": 2, "greedy": False},
        observe={"progress": False, "tensorboard": True, "report": True},
    )  # fmt: skip
    summary = springtide.train(config)
    run = tmp_path / "elsewhere" / "many"
    steps = records(config)
    assert 1 <= summary.steps < 1000, "run.minutes"
    assert steps[0]["trainer"]["kl_reference"] > 0.001, "reference.path: the default starts at 0"
    assert len(list((run / "checkpoints").glob("step-*"))) == min(3, summary.steps + 1)
    if summary.steps >= 4:
        assert abs(steps[-1]["mixture"]["letters"] - 0.75) < 0.15, "weight"
    groups = [Group.load(p) for p in (run / "trajectories").glob("0*.msgpack")]
    assert {g.task.split for g in groups if g.task.suite == "nosleepers"} == {"test"}
    assert max(len(t.turns) for g in groups for t in g.trajectories) == 2, "max_turns"
    state, most = Readiness({"nothing": 1.0}), 0
    for line in (run / "events.jsonl").read_text().splitlines():
        if (data := json.loads(line))["kind"] in {kind.__name__ for kind in Event.__args__}:
            state.apply(event_from_json(data))
            most = max(most, len(state.in_flight()))
    assert most == 3, "concurrency"
    evals = records(config, "eval")
    assert [r["label"] for r in evals] == ["start", "end"]
    assert all(r["greedy"] is None for r in evals)
    assert evals[0]["suites"]["letters"]["episodes"] == 6
    shown = [Group.load(p) for p in (run / "trajectories").glob("eval-*.msgpack")]
    assert shown and all("dev" in g.task.tags for g in shown)
    assert list((run / "tensorboard").iterdir())
    assert (run / "report.html").exists()
    assert "step 1/" not in capfd.readouterr().err, "progress"


def test_a_sink_that_is_not_installed_is_refused_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"observe\.wandb: pip install"):
            open_sinks(run_config(tmp_path, tmp_path, observe={"wandb": "project"}), tmp_path)


def test_the_seed_decides_what_is_drawn_and_sampled() -> None:
    tasks = [TaskRef(f"t{i}", "s", "1", "train", "quick", i, i) for i in range(50)]
    first, again, other = ([UniformSampler("s", tasks, seed).task(k).id for k in range(20)] for seed in (1, 1, 2))
    assert first == again != other
    seeds = [EpisodeSpec(tasks[0], 0, 0, 0, "train", run_seed, 1.0, 5, 64).seed for run_seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_every_purpose_plays_what_the_configuration_says(tmp_path: Path) -> None:
    """Training, evaluation and gold were specified in five places; one that forgets a limit trains another thing."""
    tables: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 9, "max_turns": 3, "stale_probability": 0.5}
    config = run_config(tmp_path, tmp_path, run={"seed": 5}, rollout=tables)
    task = TaskRef("t", "s", "1", "train", "quick", 0, 0)
    train = EpisodeSpec.of(config, "train", task, 1, 2, 3, stale_version=4)
    assert train == EpisodeSpec(task, 1, 2, 3, "train", 5, 0.7, 9, 256, 3, None, 4, 0.5)
    greedy = EpisodeSpec.of(config, "eval", task, 1, 2, 3, temperature=0.0, version=7)
    assert greedy == EpisodeSpec(task, 1, 2, 3, "eval", 5, 0.0, 9, 256, 3, 7)


def test_the_tool_format_can_be_forced(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    assert load_chat(model).format.name == "hermes"
    assert load_chat(model, "plain").format.name == "plain"


# --- one episode -----------------------------------------------------------------------------------------------------


class Recorder:
    """An engine that says forty forties, or as many as it may, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []

    async def generate(self, session: str, ids: np.ndarray, sampling: Sampling, **_: Any) -> Generation:
        self.asked.append(sampling)
        n = sampling.max_new_tokens
        return Generation(np.full(n, 40, np.int32), np.full(n, -1.0, np.float32), version=0, finish="length")

    async def release(self, session: str) -> None: ...


def test_limits_of_an_episode_take_effect(tiny_model: Path) -> None:
    async def episode(**limits: Any) -> tuple[Trajectory, list[Sampling]]:
        suite = f"{TESTS / 'talk.py'}:NoSleepers"
        options = {"temperature": 1.0, "max_new_tokens": 5, "context": 256, **limits}
        async with InProcessClient((suite,)) as env:
            task = (await env.catalog(suite, "train", "quick"))[0]
            engine = Recorder()
            spec = EpisodeSpec(task, 0, 0, 0, "train", 0, **options)
            return await play(spec, env, engine, load_chat(tiny_model)), engine.asked  # type: ignore[arg-type]

    def run(**limits: Any) -> tuple[Trajectory, list[Sampling]]:
        return asyncio.run(episode(**limits))

    usual, asked = run()
    assert (usual.outcome.status, len(usual.turns), asked[0].temperature) == ("completed", 3, 1.0)
    assert run(temperature=0.5)[1][0].temperature == 0.5
    assert [turn.end - turn.start for turn in run(max_new_tokens=7)[0].turns] == [7, 7, 7]
    short, _ = run(max_turns=2)
    assert (short.outcome.status, len(short.turns)) == ("turn_limit", 2)
    tight, asked = run(context=usual.turns[1].end - 2)
    assert tight.outcome.status == "context_limit"
    assert asked[-1].max_new_tokens == 3, "the last turn may fill what is left, no more"
    assert tight.tokens <= usual.turns[1].end - 2


def test_an_answer_that_no_context_holds_ends_the_episode_untokenised(tiny_model: Path) -> None:
    async def episode() -> Trajectory:
        suite = f"{TESTS / 'letters.py'}:Flooding"
        async with InProcessClient((suite,)) as env:
            task = (await env.catalog(suite, "train", "quick"))[0]
            spec = EpisodeSpec(task, 0, 0, 0, "train", 0, temperature=1.0, max_new_tokens=5, context=256)
            return await play(spec, env, Recorder(), load_chat(tiny_model))  # type: ignore[arg-type]

    trajectory = asyncio.run(episode())
    assert (trajectory.outcome.status, len(trajectory.turns)) == ("context_limit", 1)
    assert trajectory.tokens < 256 and len(trajectory.messages[-1].text) < 3000


class Failing:
    """A pool of one worker whose every episode is lost to its environment."""

    live = 0

    def __init__(self) -> None:
        self.times: list[float] = []  # of the first member's attempts

    async def acquire(self) -> Failing:
        return self

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        if method == "episode":
            if payload["spec"].member == 0:
                self.times.append(time.monotonic())
            return EpisodeSummary.lost(payload["spec"], "down", cause="tool"), ()
        return 0


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_made_at_once_as_often_as_configured(tmp_path: Path, retries: int) -> None:
    """prime-rl#2459: one bad task was rescheduled for ever. Then each further try waits, and the deadline ends it."""
    config = run_config(
        tmp_path, tmp_path, rollout={"group": {"n": 2, "retries": retries, "deadline_s": 1.0}, "concurrency": 1},
        staleness={"bound": 0}, trainer={"groups": 1},
    )  # fmt: skip
    pool, state = Failing(), Readiness({"s": 1.0})
    tasks = [TaskRef("t", "s", "1", "train", "quick", 0, 0)]
    ends: list[str] = []
    feeder = Feeder(
        config, ledger=Ledger(tmp_path / "ledger.sqlite"), state=state,
        policy=make_policy("fixed_split", Bounds(1, 1, 0)), samplers={"s": UniformSampler("s", tasks, 0)}, pool=pool,
        versions=Versions(0), directory=tmp_path, note=lambda text: None,
        record=lambda event: ends.append(event.cause) if isinstance(event, Dropped) else None,
    )  # fmt: skip

    async def run() -> None:
        feeder.apply(RankJoined(time.time(), "engine-0", "rollout", 65536))
        async with asyncio.timeout(1.2):
            await feeder.run()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    gaps = np.diff(pool.times)
    assert sum(gaps[:retries]) < 0.19 <= gaps[retries], gaps
    assert ends == ["deadline"]


def test_waiting_for_a_worker_has_the_configured_deadline() -> None:
    with pytest.raises(ProcessFailed, match=r"no rollout worker came up within 0\.1 s"):
        asyncio.run(Pool([], 0.1).acquire())


def test_engine_sizes_reach_the_engine() -> None:
    table = {"max_batch": 3, "kv_tokens": 640, "prefill_chunk": 7, "weight_slots": 2, "device": "cuda:1"}
    settings = EngineSettings.of("m", "s", {**table, "kind": "local", "ranks": 1})
    assert {name: getattr(settings, name) for name in table} == table


# --- one step --------------------------------------------------------------------------------------------------------

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5), (12, 4)], [(33, 15)]]]


def _train(directory: Path, model: Path, items: list[dict], **tables: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The weights after three steps, and the last step's figures."""
    rank = Rank()
    rank.init(config=trainer_config(**tables).model_dump(mode="json"), model=str(model))
    for _ in range(3):
        figures = rank.train(items=tuple(items), version=0)
    policy, _ = rank._ready()
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), figures


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict], torch.Tensor, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("step")
    model = trainer_model(directory / "model")
    items = write_groups(directory / "groups", SHAPES)
    return model, items, *_train(directory, model, items)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("algorithm", "clip_low", 0.9),
        ("algorithm", "clip_high", 3.0),
        ("algorithm", "dual_clip", 1.1),
        ("algorithm", "aggregation", "trajectory_mean"),
        ("trainer", "optimizer", "muon"),
        ("trainer", "lr", 2e-2),
        ("trainer", "warmup", 5),
        ("trainer", "weight_decay", 0.5),
        ("trainer", "betas", [0.5, 0.6]),
        ("trainer", "grad_clip", 1e-3),
        ("trainer", "micro_tokens", 64),
    ],
)
def test_options_of_the_step_change_the_weights(usual: Any, tmp_path: Path, table: str, key: str, value: Any) -> None:
    model, items, weights, figures = usual
    tables: dict[str, Any] = {table: {key: value}}
    if table == "trainer":
        tables["trainer"].setdefault("lr", 1e-2)
    changed, with_option = _train(tmp_path, model, items, **tables)
    if key == "micro_tokens":  # the one that must not change them
        assert with_option["micro_batches"] > figures["micro_batches"]
        assert torch.allclose(changed, weights, atol=1e-4)
    elif key == "grad_clip":  # Adam divides a common factor out, but for its epsilon
        assert with_option["grad_norm"] != figures["grad_norm"] or not torch.equal(changed, weights)
    else:
        assert not torch.allclose(changed, weights, atol=1e-5)


def test_the_device_reaches_the_trainer(tmp_path: Path) -> None:
    model = trainer_model(tmp_path)
    config = trainer_config(trainer={"device": "meta"}).model_dump(mode="json")
    with pytest.raises(RuntimeError, match="meta tensors"):  # a device that holds no numbers: it got there
        Rank().init(config=config, model=str(model), role="reference")


def test_advantage_options_change_the_advantages() -> None:
    from springtide.algorithms.advantages import GroupRewards, Member, advantages
    from springtide.config import Algorithm

    rewards = [(0, "completed", 1.0), (1, "completed", 0.0), (2, "turn_limit", 0.3)]
    mixed = GroupRewards("t", 0, "s", tuple(Member(m, s, r, False, m + 1) for m, s, r in rewards))  # type: ignore[arg-type]
    equal = GroupRewards("u", 1, "s", tuple(Member(m, "completed", 1.0, True, 1) for m in range(2)))

    def of(**options: Any) -> Any:
        return [(a.values, a.dropped) for a in advantages([mixed, equal], Algorithm(**options))]

    usual = of()
    plain = of(task_norm="none")
    assert plain != usual
    assert (undivided := of(task_norm="none", divide_by_std=False)) != plain
    assert of(task_norm="none", divide_by_std=False, advantage="leave_one_out") != undivided
    assert of(incomplete_reward=-0.5) != usual
    assert of(equal_rewards="keep")[1] == ({0: 0.0, 1: 0.0}, None) != usual[1]
