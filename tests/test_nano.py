"""springtide-nano: the shipped directory, its tokenizer and template, its drills and its builder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.nano import training
from scripts.nano.dialogue import Dialogue, Turn, call_text, encode
from scripts.nano.drills import DRILLS, Lexicon
from scripts.nano.following import follow
from scripts.nano.gold import GOLD_TASKS, SUITES, Seen, see, training_tasks
from scripts.nano.network import hidden_states
from scripts.nano.packaging import package

import springtide
from springtide.chat import Chat, check_vocab, load_chat
from springtide.config import load_config
from springtide.models.presets import resolve_model
from springtide.trace import Message, ToolCall

NANO = resolve_model("springtide-nano")
LEXICON = Lexicon(["Naju", "Lee Daniels", "IT Manager", "Phetchaburi", "São Tomé"])


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load_chat(NANO)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see(most=24, prompts=24)


def _drills(seed: int, each: int) -> list[Dialogue]:
    rng = random.Random(seed)
    return [make(rng, LEXICON) for make in DRILLS.values() for _ in range(each)]


def _schemas(dialogue: Dialogue) -> list[dict]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {a: {} for a in arguments}}}}
        for name, arguments in dialogue.tools
    ]


def _message(turn: Turn) -> Message:
    name, arguments = turn.call
    if not name:
        return Message("assistant", arguments["text"])
    return Message("assistant", "", (ToolCall("call_0", name, json.dumps(arguments, ensure_ascii=False)),))


def test_the_shipped_directory_loads_in_transformers_and_is_small():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(NANO)
    assert model.config.model_type == "qwen3"
    assert sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert (NANO / "model.safetensors").stat().st_size < 5_000_000
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    assert len(tokenizer) <= 2048 and len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_chat_and_model_agree_on_the_vocabulary_and_on_the_call_format(chat: Chat):
    check_vocab(chat, json.loads((NANO / "config.json").read_text())["vocab_size"])
    assert chat.format.name == "hermes" and chat.decode(chat.stop_ids) == "<|im_end|>"


def test_chat_renders_as_transformers_does(chat: Chat):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(NANO)
    for dialogue in _drills(1, 3):
        messages = [Message("user", dialogue.prompt), _message(dialogue.turns[0])]
        views = [m.to_openai() for m in messages]
        ids = theirs.apply_chat_template(views, tools=_schemas(dialogue), tokenize=True, return_dict=False)
        assert ids == chat.encode(chat.render(chat.views(messages), chat.tools(_schemas(dialogue)))).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_training_ids_are_those_of_a_rollout(chat: Chat, tokenizer, seed: int):
    """The direct rendering of drills equals, id for id and mask for mask, what a conversation records."""
    for dialogue in _drills(seed, 5):
        conversation = chat.start([Message("user", dialogue.prompt)], _schemas(dialogue))
        for i, turn in enumerate(dialogue.turns):
            parsed = conversation.assistant(conversation.render_gold(_message(turn)), "stop")
            assert [c.error for c in parsed.tool_calls] == [None] * len(parsed.tool_calls)
            if turn.call[0]:
                assert (parsed.tool_calls[0].name, json.loads(parsed.tool_calls[0].arguments)) == turn.call
            else:
                assert parsed.content == turn.call[1]["text"]
            if i + 1 < len(dialogue.turns):
                assert conversation.observe([Message("tool", turn.reply, tool_call_id="call_0")]), "a new segment began"
        (segment,) = conversation.segments()
        taught = Dialogue(
            dialogue.suite, dialogue.tools, dialogue.prompt, tuple(Turn(t.call, t.reply) for t in dialogue.turns)
        )
        ((ids, learn),) = encode([taught], tokenizer)
        assert np.array_equal(ids, segment.ids) and np.array_equal(learn, segment.loss_mask)


def test_a_system_message_and_a_broken_call_keep_the_template_prefix_stable(chat: Chat):
    tools = _schemas(_drills(0, 1)[0])
    conversation = chat.start([Message("system", "Be brief."), Message("user", "Go.")], tools)
    broken = chat.encode('<tool_call>\n{"name": "execute_sql", "arguments": {"sql": \n</tool_call><|im_end|>')
    assert conversation.assistant(broken, "stop").tool_calls[0].error
    assert conversation.observe([Message("tool", "malformed", tool_call_id="call_0"), Message("user", "Again.")])
    assert "Be brief." in chat.decode(conversation.ids) and len(conversation.segments()) == 1


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_every_text_survives_the_tokenizer(text: str):
    chat = load_chat(NANO)
    assert chat.decode(chat.encode(text)) == text


def test_a_name_has_the_same_tokens_wherever_it_stands(chat: Chat):
    """A name with other tokens behind a space than behind a quote could not be copied into a call."""
    for name in ("Naju", "Lee Daniels", "trackPrice", "city_name", "Åland", "KOR", "1984"):
        inside = chat.encode(name).tolist()
        for text in (f"the country of {name} is", f"name='{name}' and", f'"variable": "{name}"', f"\n{name}\n"):
            ids = chat.encode(text).tolist()
            assert any(ids[i : i + len(inside)] == inside for i in range(len(ids))), (name, text)


def test_gold_episodes_at_quick_take_at_most_150_tokens(seen: Seen, tokenizer):
    for suite, dialogues in seen.gold.items():
        lengths = [len(ids) for ids, _ in encode(dialogues, tokenizer)]
        assert np.mean(lengths) <= 150, suite


def test_training_sees_no_dev_task_and_at_most_256_a_suite():
    from springtide.env import load_suite

    for suite in SUITES:
        refs = tuple(task.ref for task in load_suite(suite).select("train", "quick")[:400])
        chosen = training_tasks(refs)
        assert len(chosen) == GOLD_TASKS and not any("dev" in ref.tags for ref in chosen)
        assert max(ref.index for ref in chosen) < 300


def test_the_quickstart_counts_as_gold_what_the_start_has_seen():
    preset = load_config(Path(springtide.__file__).parent / "cli" / "quickstart.toml")
    assert preset.trainer.cold_start.tasks == GOLD_TASKS


def test_drills_offer_the_suites_tools_and_ask_in_their_words(seen: Seen):
    drills = {d.suite: d for d in _drills(3, 1)}
    assert {suite: d.tools for suite, d in drills.items()} == seen.tools


def test_drills_follow_from_their_seed_and_differ(tokenizer):
    assert [d.text() for d in _drills(5, 4)] == [d.text() for d in _drills(5, 4)]
    many = _drills(6, 100)
    assert len({d.prompt for d in many}) > 290
    assert all(turn.learn for d in many for turn in d.turns[-2:])


def test_every_argument_of_a_drill_stands_in_what_was_read_before():
    """Names, values, columns, relations and places are copied, never known: what a drill teaches is reading."""
    for dialogue in _drills(7, 60):
        read = dialogue.prompt
        for turn in dialogue.turns:
            name, arguments = turn.call
            for value in arguments.values():
                for word in _copied(name, value):
                    assert word in read, (word, dialogue)
            read += "\n" + turn.reply


def _copied(tool: str, value: str) -> list[str]:
    if not tool:
        return [value.removeprefix("Final Answer: ")]
    if tool not in ("execute_sql", "commit_final_answer"):
        return [value]
    spoken = {"PRAGMA", "table_list", "table_info", "SELECT", "COUNT", "FROM", "WHERE", "ORDER", "BY", "DESC", "LIMIT"}
    words = value.replace("table_info(", "table_info ").replace("COUNT(*)", "COUNT").rstrip(")")
    for mark in ("=", ">", "'", "("):
        words = words.replace(mark, " ")
    return [w for w in words.split() if w not in spoken | {"UPDATE", "SET", "1"}]


def test_the_fast_forward_equals_transformers():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (3, 40))
    with torch.no_grad():
        theirs = model.model(input_ids=ids, use_cache=False).last_hidden_state
        assert (hidden_states(model, ids) - theirs).abs().max() < 1e-4


def test_an_untrained_nano_copies_already(tokenizer):
    """The start holds an induction circuit: the token that followed before is ranked among the first few."""
    run = training.start(training.Recipe(), tokenizer)
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for _ in range(10):
        words = torch.randperm(tokenizer.get_vocab_size(), generator=generator)[:20]
        ids = torch.cat([words, words[5:15]])[None]
        with torch.no_grad():
            logits = hidden_states(run.model, ids)[0] @ run.model.model.embed_tokens.weight.T
        for i in range(8):
            ranks.append(int((logits[20 + i] > logits[20 + i, ids[0, 21 + i]]).sum()))
    assert np.median(ranks) <= 3


def test_a_few_steps_of_the_builder_lower_the_loss_and_resume_exactly(seen: Seen, tokenizer, tmp_path: Path):
    torch.set_num_threads(1)
    recipe = training.Recipe(steps=8, batch=6, micro_batch=3, warmup=2)
    lexicon = Lexicon(seen.names())

    def go(run: training.Run, to: int) -> list[float]:
        return [
            training.train_step(run, training.draw(recipe, run.step, seen, lexicon), tokenizer)
            for _ in range(run.step, to)
        ]

    whole = training.start(recipe, tokenizer)
    losses = go(whole, 8)
    assert np.mean(losses[-2:]) < 0.6 * losses[0]
    half = training.start(recipe, tokenizer)
    go(half, 4)
    training.save(half, tmp_path / "nano.pt")
    assert (tmp_path / "nano.pt").stat().st_size < 25_000_000
    resumed = training.resume(tmp_path / "nano.pt")
    assert go(resumed, 8) == losses[4:]
    package(resumed.model, tokenizer, tmp_path / "nano")
    drills = _drills(9, 2)
    assert load_chat(tmp_path / "nano").vocab_size == tokenizer.get_vocab_size()
    assert all(0 <= f.probability <= 1 for f in follow(resumed.model, tokenizer, drills))


def test_a_call_is_written_as_the_hermes_format_writes_it(chat: Chat):
    call = ToolCall("c", "go", '{"place": "shelf"}')
    assert call_text(("go", {"place": "shelf"})) == chat.format.render([call])
