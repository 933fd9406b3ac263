"""Data sets as environments: rows become tasks, verifiers judge replies, and a bad row is one line with its place."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from run_support import records, run_config, start_run
from springtide.cli.doctor import app
from springtide.config import load_config
from springtide.env import InProcessClient, Message, load_suite
from springtide.env.suite import SuiteError
from springtide.env.verify import final, letter, number, numeric

EXAMPLE = Path(__file__).parent.parent / "examples" / "data" / "sums.toml"


def describe(directory: Path, rows: list[dict[str, Any]] | str, text: str = "", name: str = "quiz") -> str:
    """A data set of `rows` (or the lines of a file) in `directory`; returns its description's path."""
    lines = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{name}.jsonl").write_text(lines)
    (directory / f"{name}.toml").write_text(f'data = "{name}.jsonl"\n{text}')
    return str(directory / f"{name}.toml")


def reward(use: str, reply: str, index: int = 0, split: str = "train") -> float | None:
    """What a reply to a row's prompt earns; None: an environment error."""

    async def play() -> float | None:
        async with InProcessClient([use]) as client:
            suite = load_suite(use)
            session = await client.open(suite.select(split, None)[index].ref, 0, 0, 0, 60)
            await session.act(Message("assistant", reply), 0)
            outcome = await session.finish("done")
            await session.close()
            assert outcome.reward is not None or outcome.cause == "judge"
            return outcome.reward

    return asyncio.run(play())


ROWS = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(200)]


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_rows_are_tasks_whose_split_is_that_of_their_prompt(tmp_path) -> None:
    suite = load_suite(describe(tmp_path, ROWS, "test = 0.25"))
    train, test = suite.select("train", None), suite.select("test", None)
    assert len(train) + len(test) == 200 and 25 < len(test) < 75 and len(suite.select("ood", None)) == 0
    prompts = {split: {t.payload["messages"][0][1] for t in tasks} for split, tasks in (("a", train), ("b", test))}
    assert not prompts["a"] & prompts["b"]
    assert [("dev" in t.tags) for t in train] == [i % 10 == 9 for i in range(len(train))]
    again = load_suite(describe(tmp_path, ROWS[::-1], "test = 0.25", "reversed"))
    assert {t.payload["messages"][0][1] for t in again.select("test", None)} == prompts["b"]


def test_a_column_says_the_split_and_is_no_part_of_the_task(tmp_path) -> None:
    rows = [{**row, "part": part} for row, part in zip(ROWS, ("train", "test", "ood", "validation"))]
    suite = load_suite(describe(tmp_path, rows, 'split = "part"'))
    assert [len(suite.select(s, None)) for s in ("train", "test", "ood")] == [1, 2, 1]
    assert suite.select("ood", None)[0].payload["row"] == ROWS[2]


def test_other_rows_are_another_version_and_the_same_ones_are_not(tmp_path) -> None:
    """NeMo-RL#2519: a changed data set silently skipped rows after a resume."""
    use = describe(tmp_path, ROWS)
    first = load_suite(use)
    assert load_suite(use).version == first.version
    assert load_suite(describe(tmp_path, ROWS[:-1])).version != first.version
    assert load_suite(describe(tmp_path, ROWS, 'verifier = "numeric"')).version != first.version


def test_prompts_may_be_messages_and_columns_nested_as_trl_and_verl_write_them(tmp_path) -> None:
    trl = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "answer": 4}
    verl = {
        "data_source": "d",
        "prompt": [{"role": "user", "content": "3 + 3?"}],
        "reward_model": {"ground_truth": "6"},
    }
    use = describe(tmp_path, [trl, verl], 'system = "Answer."\ntest = 0')
    opened = [t.payload["messages"] for t in load_suite(use).select("train", None)]
    assert opened == [
        [("system", "Be brief."), ("user", "2 + 2?")],
        [("system", "Answer."), ("user", "3 + 3?")],
    ]
    assert reward(use, "4") == 1.0 and reward(use, "6", 1) == 1.0 and reward(use, "4", 1) == 0.0


def test_a_data_file_needs_no_description(tmp_path) -> None:
    describe(tmp_path, ROWS, name="My Quiz")
    suite = load_suite(str(tmp_path / "My Quiz.jsonl"))
    assert suite.name == "my_quiz"
    assert len(suite.select("train", None)) > 150


def test_the_examples_data_pass_the_checker() -> None:
    result = CliRunner().invoke(app, ["env", str(EXAMPLE), "--tasks", "2", "--json"])
    (report,) = json.loads(result.stdout)
    assert result.exit_code == 0 and {v["verdict"] for v in report["verdicts"]} == {"ok"}


def test_a_runs_data_are_looked_for_beside_its_file(tmp_path) -> None:
    describe(tmp_path, ROWS)
    (tmp_path / "run.toml").write_text('[[suites]]\nuse = "quiz.toml"\n[[suites]]\nuse = "quiz.jsonl"\n')
    assert [s.use for s in load_config(tmp_path / "run.toml").suites] == [
        str(tmp_path / "quiz.toml"),
        str(tmp_path / "quiz.jsonl"),
    ]


# --- verifiers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verifier", "answer", "right", "wrong"),
    [
        (
            "exact",
            "Paris",
            ("Paris", " Paris\n", "Hm.\nAnswer: Paris", "\\boxed{Paris}"),
            ("paris", "Paris, France", ""),
        ),
        ("exact", ["Paris", "paris"], ("Paris", "paris"), ("PARIS",)),
        (
            "numeric",
            "She has 1,234 apples.\n#### 1,234",
            ("1234", "It is 1234.0", "12 + 1222, so #### 1234", "\\boxed{1234}.", "The answer is 1,234."),
            ("1235", "-1234", "none", "", "1234 or 5", "12,34"),
        ),
        ("numeric", "1/2", ("0.5", ".50", "2/4", "5e-1"), ("0.51", "1", "1/0")),
        (
            "choice",
            "B",
            ("B", "(B)", "b", "I think (B).", "A is wrong. The answer is B", "\\boxed{B}"),
            ("A", "BA", ""),
        ),
        ("choice", 1, ("B",), ("A", "1")),
        ("choice", "A", ("A", "I say A"), ("I",)),
        ("regex", r"\bpar[ií]s\b", ("the city of paris.",), ("parish",)),
    ],
)
def test_verifiers_tell_right_from_wrong(tmp_path, verifier, answer, right, wrong) -> None:
    use = describe(tmp_path, [{"prompt": "?", "answer": answer}], f'verifier = "{verifier}"\ntest = 0')
    assert [reward(use, text) for text in right] == [1.0] * len(right)
    assert [reward(use, text) for text in wrong] == [0.0] * len(wrong)


def test_options_of_verifiers_change_what_counts(tmp_path) -> None:
    row = {"prompt": "?", "answer": "100"}
    use = describe(tmp_path, [row], 'verifier = "numeric"\ntolerance = 0.01\ntest = 0')
    assert (reward(use, "100.9"), reward(use, "101.1")) == (1.0, 0.0)
    use = describe(tmp_path, [row], "verifier = \"numeric\"\nextract = '<a>(.*?)</a>'\ntest = 0", "tagged")
    assert (reward(use, "<a>100</a> 5"), reward(use, "100")) == (1.0, 0.0)


def test_a_function_of_ones_own_judges_the_reply_with_its_row(tmp_path) -> None:
    (tmp_path / "grade.py").write_text(
        "def grade(text, row):\n    if text == 'break':\n        raise ValueError('no data')\n"
        "    row['seen'] = True\n    return len(text) / row['longest']\n"
        "async def later(text, row):\n    return 1.0\n"
    )
    use = describe(tmp_path, [{"prompt": "?", "longest": 4}], 'verifier = "grade.py:grade"\ntest = 0')
    assert (reward(use, "ab"), reward(use, "abcd")) == (0.5, 1.0)
    assert reward(use, "break") is None  # verl#5635: a judge that raises is no reward of 0
    assert "seen" not in load_suite(use).select("train", None)[0].payload["row"]
    for verifier, told in (
        ("grade.py:none", "grade.py has no plain function 'none'"),
        ("grade.py:later", "no plain function 'later'"),
        ("nowhere.py:grade", "there is no file"),
        ("fuzzy", "no verifier 'fuzzy'; there are exact, numeric, choice, regex"),
    ):
        with pytest.raises(SuiteError, match=told):
            load_suite(describe(tmp_path, [{"prompt": "?", "answer": "x"}], f'verifier = "{verifier}"', "other"))


@given(st.text(max_size=300))
def test_no_reply_is_an_error(text: str) -> None:
    """tinker-cookbook#644: a grader that breaks on odd replies scores a model on its luck."""
    given_, verify = final(text), numeric(0.0)
    assert isinstance(given_, str)
    assert verify(given_, ["1"]) in (True, False)
    assert letter(text) is None or len(letter(text) or "") >= 1
    assert number("7" * 5000) is not None or True


@given(st.fractions(max_denominator=10**6) | st.integers() | st.decimals(-(10**9), 10**9, places=6, allow_nan=False))
def test_a_number_is_found_as_it_was_written(value) -> None:
    from fractions import Fraction

    assert number(f"so it is {value}.") == Fraction(value)
    assert number(f"7 apples, {value}") == Fraction(value)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "told"),
    [
        ("{nonsense", "", "quiz.jsonl:3: not JSON: Expecting property name enclosed in double quotes$"),
        ("[1, 2]", "", "quiz.jsonl:3: list, not an object with columns"),
        ('{"prompt": "?"}', "", "quiz.jsonl:3: none of the columns answer, .*it has prompt"),
        ('{"prompt": "?", "answer": "x"}', 'answer = "key"', r"quiz.jsonl:1: no column 'key' \(set answer = ...\)"),
        ('{"prompt": " ", "answer": "x"}', "", "quiz.jsonl:3: its prompt is empty"),
        ('{"prompt": [{"role": "user", "content": 3}], "answer": "x"}', "", "quiz.jsonl:3: its prompt holds"),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "x"}',
            "",
            "3: its prompt ends with .* assistant",
        ),
        ('{"prompt": "\\ud800", "answer": "x"}', "", "quiz.jsonl:3: .*half a surrogate pair"),
        ('{"prompt": "?", "answer": []}', "", "quiz.jsonl:3: its answer is an empty list"),
        ('{"prompt": "?", "answer": {"a": 1}}', "", "quiz.jsonl:3: its answer is {'a': 1}"),
        ('{"prompt": "?", "answer": "many"}', 'verifier = "numeric"', "3: its answer 'many' holds no number"),
        ('{"prompt": "?", "answer": "1 2"}', 'verifier = "choice"', "quiz.jsonl:1: its answer '4' holds no letter"),
        ('{"prompt": "?", "answer": "("}', 'verifier = "regex"', "quiz.jsonl:3: .* is no regular expression"),
        ('{"prompt": "?", "answer": "x", "split": "later"}', "", "quiz.jsonl:3: its split is 'later'; it may be train"),
        ('{"prompt": "?", "answer": "x"}', 'promt = "x"', "quiz.toml: promt: no such key; there are data,"),
        ('{"prompt": "?", "answer": "x"}', "test = 2", "quiz.toml: test: Input should be less than 1"),
        ('{"prompt": "?", "answer": "x"}', "extract = '('", "quiz.toml: extract is no regular expression"),
    ],
)
def test_a_bad_row_is_one_line_with_its_file_and_line(tmp_path, line: str, text: str, told: str) -> None:
    use = describe(tmp_path, '{"prompt": "2 + 2?", "answer": "4"}\n\n' + line + "\n", text)
    with pytest.raises(SuiteError, match=told) as caught:
        load_suite(use)
    assert "\n" not in str(caught.value)


def test_data_that_are_not_there_are_one_line(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1,2\n")
    for name in ("no.jsonl", "no.parquet", "./no", "rows.csv"):
        (tmp_path / f"of-{Path(name).stem}-{Path(name).suffix[1:]}.toml").write_text(f'data = "{name}"')
    for use, told in (
        (str(tmp_path / "no.toml"), "there is no file"),
        (str(tmp_path / "no.jsonl"), "there is no file"),
        (str(tmp_path / "of-no-jsonl.toml"), "there is no file .*no.jsonl"),  # whether or not `datasets` is installed
        (str(tmp_path / "of-no-parquet.toml"), "there is no file .*no.parquet"),
        (str(tmp_path / "of-no-.toml"), "there is no file .*no"),
        (str(tmp_path / "of-rows-csv.toml"), "rows.csv is neither .jsonl nor .parquet"),
    ):
        with pytest.raises(SuiteError, match=told):
            load_suite(use)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SuiteError, match="holds no row"):
        load_suite(str(tmp_path / "empty.jsonl"))
    result = CliRunner().invoke(app, ["env", str(tmp_path / "empty.jsonl")])
    assert result.exit_code == 2


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def test_without_datasets_its_formats_name_what_to_install(tmp_path) -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        (tmp_path / "quiz.parquet").write_bytes(b"PAR1")
        with pytest.raises(SuiteError, match=r"read with Hugging Face datasets; install springtide\[datasets\]"):
            load_suite(str(tmp_path / "quiz.parquet"))
    else:
        pytest.skip("datasets is installed")


@pytest.mark.parametrize("form", ["parquet", "directory", "splits"])
def test_datasets_formats_hold_the_same_tasks_as_lines(tmp_path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    if form == "parquet":
        rows.to_parquet(str(tmp_path / "other.parquet"))
        use = str(tmp_path / "other.parquet")
    else:
        data = (
            rows
            if form == "directory"
            else datasets.DatasetDict(train=rows.select(range(150)), test=rows.select(range(150, 200)))
        )
        data.save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "other.toml").write_text('data = "saved"\n')
        use = str(tmp_path / "other.toml")
    suite, lines = load_suite(use), load_suite(describe(tmp_path, ROWS))
    contents = {split: [t.payload for t in suite.select(split, None)] for split in ("train", "test")}
    if form == "splits":
        assert [len(c) for c in contents.values()] == [150, 50]
    else:
        assert contents == {split: [t.payload for t in lines.select(split, None)] for split in contents}
    assert reward(use, contents["test"][0]["answers"][0], split="test") == 1.0


def test_a_bad_row_of_datasets_is_named_by_its_number(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([*ROWS[:3], {"prompt": "", "answer": "x"}]).to_parquet(str(tmp_path / "q.parquet"))
    with pytest.raises(SuiteError, match=r"q\.parquet, row 3: its prompt is empty"):
        load_suite(str(tmp_path / "q.parquet"))
    (tmp_path / "gone.toml").write_text('data = "./nowhere"\n')
    with pytest.raises(SuiteError, match="cannot be loaded: FileNotFoundError"):
        load_suite(str(tmp_path / "gone.toml"))


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_trains_on_a_data_set(tiny_model, tmp_path) -> None:
    rows = [{"prompt": f"say {i}", "answer": "[a-mA-M]"} for i in range(60)]
    use = describe(tmp_path, rows, 'verifier = "regex"')
    config = run_config(tiny_model, tmp_path / "runs", suites=[{"use": use}], run={"steps": 2})
    process = start_run(config)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    steps = records(config)
    assert len(steps) == 2 and all(0 < r["reward"]["quiz"] < 1 for r in steps)
