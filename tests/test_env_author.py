"""The author's side: what a class may look like, how suites are found, and what the checker finds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import pytest
from typer.testing import CliRunner

from springtide.cli.doctor import app
from springtide.env import (
    Environment,
    EnvironmentUnavailable,
    EpisodeRunner,
    InProcessClient,
    Limits,
    Message,
    Requires,
    Suite,
    SuiteError,
    TaskList,
    load_suite,
    tool,
)
from springtide.env.check import Checker, Verdict
from springtide.trace import ToolCall

EXAMPLES = Path(__file__).parent.parent / "examples"


class Base(Environment):
    @classmethod
    def tasks(cls, split, level):
        return TaskList(20, lambda i: cls.make_task(split, level, i, {"word": f"{split} {i}"}))

    async def start(self):
        self.said = None
        return f"Say {self.task.payload['word']}."

    @tool(final=True)
    async def say(self, word: str) -> str:
        """Say it."""
        self.said = word
        return "said"

    async def score(self):
        return float(self.said == self.task.payload["word"])

    async def gold(self):
        return [("say", {"word": self.task.payload["word"]})]


# --- schemas -------------------------------------------------------------------------------------------------------


def test_a_schema_comes_from_hints_and_docstring() -> None:
    class Shop(Environment):
        @tool
        async def search(
            self,
            words: str,
            limit: int = 5,
            order: Literal["price", "name"] = "name",
            above: float | None = None,
            tags: list[str] | None = None,
            options: Annotated[dict[str, bool], "switches"] = {},  # noqa: B006
        ) -> str:
            """Search the shop.
            Finds items by name.

            Args:
                words: what to look for,
                    separated by blanks
                limit (int): how many at most

            Returns:
                words: never part of the schema
            """
            return ""

    function = Shop.tools["search"].schema["function"]
    assert function == {
        "name": "search",
        "description": "Search the shop. Finds items by name.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "what to look for, separated by blanks"},
                "limit": {"type": "integer", "description": "how many at most", "default": 5},
                "order": {"type": "string", "enum": ["price", "name"], "default": "name"},
                "above": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {
                    "type": "object",
                    "additionalProperties": {"type": "boolean"},
                    "description": "switches",
                    "default": {},
                },
            },
            "required": ["words"],
        },
    }
    json.dumps(function)


def _define(**members: object) -> type:
    return type("Broken", (Environment,), members)


def test_a_tool_that_cannot_be_described_fails_when_its_class_is_created() -> None:
    @tool
    def unhinted(self, word):  # type: ignore[no-untyped-def]
        """Say."""

    @tool
    def undocumented(self, word: str): ...  # type: ignore[no-untyped-def]

    @tool
    def odd(self, word: bytes):  # type: ignore[no-untyped-def]
        """Say."""

    @tool
    def starred(self, *words: str):  # type: ignore[no-untyped-def]
        """Say."""

    with pytest.raises(TypeError, match=r"Broken.unhinted: parameter 'word' has no type hint; use one of str, int"):
        _define(unhinted=unhinted)
    with pytest.raises(TypeError, match=r"Broken.undocumented has no docstring"):
        _define(undocumented=undocumented)
    with pytest.raises(TypeError, match=r"Broken.odd: parameter 'word' has the type <class 'bytes'>; use one of"):
        _define(odd=odd)
    with pytest.raises(TypeError, match=r"name every parameter"):
        _define(starred=starred)


def test_an_inherited_tool_is_kept_withdrawn_or_replaced_but_not_shadowed() -> None:
    class Less(Base):
        say = None  # type: ignore[assignment]

    assert list(Less.tools) == []
    with pytest.raises(TypeError, match="put @tool above it"):
        type("Shadow", (Base,), {"say": lambda self: ""})


def test_a_tool_that_is_replaced_in_its_own_class_body_fails_when_the_class_is_created() -> None:
    def hiding(method):  # type: ignore[no-untyped-def]
        return lambda self: "hidden"

    def telling(method):  # type: ignore[no-untyped-def]
        @functools.wraps(method)
        async def told(self, *args):  # type: ignore[no-untyped-def]
            return await method(self, *args)

        return told

    replaced = r"^Twice.find: the tool of line \d+ is replaced in the same class, by another find \(rename one\)"
    with pytest.raises(TypeError, match=replaced):

        class Twice(Base):
            @tool
            async def find(self, word: str) -> str:
                """Find a word."""
                return word

            @tool(final=True)
            async def find(self, number: int) -> str:  # noqa: F811
                """Find a number."""
                return str(number)

    with pytest.raises(TypeError, match=r"^Plain.find: .* by another find"):

        class Plain(Base):
            @tool(final=True)
            async def find(self) -> str:
                """Find."""
                return ""

            def find(self) -> str:  # type: ignore[no-redef]  # noqa: F811
                return "no tool any more"

    with pytest.raises(TypeError, match=r"^Mixin.find: .* \(put @tool on top\)"):

        class Mixin:
            @hiding
            @tool
            async def find(self) -> str:
                """Find."""
                return ""

        type("Mixed", (Mixin, Base), {})

    class Fine(Base):
        @telling
        @tool
        async def find(self) -> str:
            """Find."""
            return ""

        seek = find

        @tool
        async def say(self, word: str) -> str:
            """Replaces an inherited one, which is allowed."""
            return word

    assert [(name, made.name) for name, made in Fine.tools.items()] == [(n, n) for n in ("say", "find", "seek")]


def test_turn_limits_and_deadlines_come_from_the_class() -> None:
    class Long(Base):
        max_turns = 30
        limits = Limits(act_s=5)
        requires = Requires(start_s=120)

    class Longer(Long):
        max_turns = 40

    assert (Long.limits.max_turns, Long.limits.act_s, Long.limits.start_s) == (30, 5, 120)
    assert (Longer.limits.max_turns, Longer.limits.act_s, Longer.name) == (40, 5, "longer")
    with pytest.raises(TypeError, match="set one of them"):
        _define(max_turns=3, limits=Limits(max_turns=4))


def test_a_task_may_offer_fewer_tools_and_the_others_are_unknown() -> None:
    class Narrow(Base):
        def offered(self):
            return ["say"]

        @tool
        async def shout(self, word: str) -> str:
            """Shout it."""
            raise AssertionError("never offered")

    async def main() -> None:
        runner = await EpisodeRunner.open(Narrow(Narrow.tasks("train", "default")[0]))
        assert [schema["function"]["name"] for schema in runner.tools] == ["say"]
        call = ToolCall("c", "shout", '{"word": "a"}')
        observation = await runner.act(Message("assistant", tool_calls=(call,)), 0)
        assert observation.messages[0].text == "Error: there is no tool 'shout'; the tools are say"
        await runner.close()

    asyncio.run(main())


def test_an_instance_plays_one_episode_and_no_second() -> None:
    async def main() -> None:
        environment = Base(Base.tasks("train", "default")[0])
        await (await EpisodeRunner.open(environment)).close()
        with pytest.raises(RuntimeError, match="make a new one"):
            await EpisodeRunner.open(environment)

    asyncio.run(main())


def test_a_cancellation_that_an_author_raises_in_place_is_an_error_and_nobody_waits_for_ever() -> None:
    class Closed(Base):
        @classmethod
        @contextlib.asynccontextmanager
        async def shared(cls):
            raise asyncio.CancelledError
            yield

    class Gone(Base):
        def __init__(self, *args):
            raise asyncio.CancelledError

    class Narrow(Base):
        def offered(self):
            raise SystemExit(2)

    async def main() -> None:
        for kind, seen in ((Closed, "Closed.shared raised Cancelled"), (Gone, "Cancelled"), (Narrow, "SystemExit(2)")):
            async with asyncio.timeout(10), InProcessClient([Suite.of(kind)]) as client:
                (ref, *_) = await client.catalog(kind.name, "train", "default")
                with pytest.raises(EnvironmentUnavailable) as caught:
                    await client.open(ref, 0, 0, 0, 8.0)
                assert caught.value.cause == "setup" and seen in caught.value.detail

    asyncio.run(main())


def test_what_one_suite_shares_is_left_although_the_end_of_anothers_fails() -> None:
    left: list[str] = []

    def sharing(title: str) -> type[Base]:
        class Sharing(Base):
            name = title

            @classmethod
            @contextlib.asynccontextmanager
            async def shared(cls):
                yield
                left.append(cls.name)
                raise OSError(f"{cls.name} cannot be removed")

        return Sharing

    async def main() -> None:
        kinds = [sharing("one"), sharing("two")]
        async with InProcessClient([Suite.of(kind) for kind in kinds]) as client:
            for kind in kinds:
                await (await client.open(kind.tasks("train", "default")[0].ref, 0, 0, 0, 8.0)).close()

    with pytest.raises(OSError, match="cannot be removed"):
        asyncio.run(main())
    assert left == ["two", "one"]


def test_a_dev_tenth_of_train_is_tagged_and_ids_and_seeds_follow_the_index() -> None:
    tasks = Base.tasks("train", "default")
    assert [task.index for task in tasks if "dev" in task.tags] == [9, 19]
    assert tasks[3].id == "base/default/train/3" and tasks[-1].index == 19
    assert len({task.seed for task in tasks}) == 20 and tasks[3].seed == Base.tasks("train", "default")[3].seed
    assert not any(task.tags for task in Base.tasks("test", "default"))


# --- suites --------------------------------------------------------------------------------------------------------


def test_a_missing_suite_is_one_line_that_lists_those_available(tmp_path: Path) -> None:
    known = r"^no suite 'chess'; there are .*db.*household.*kg.*FILE.py:Class, or a file of data$"
    with pytest.raises(SuiteError, match=known):
        load_suite("chess")
    with pytest.raises(SuiteError, match="there is no file"):
        load_suite(str(tmp_path / "none.py") + ":Shop")
    with pytest.raises(SuiteError, match="has no environment 'Shopp'; it has Shop"):
        load_suite(f"{EXAMPLES / 'shop.py'}:Shopp")
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(SuiteError, match=r"bad.py fails on import: ZeroDivisionError"):
        load_suite(str(tmp_path / "bad.py") + ":Shop")


def test_a_suite_that_cannot_work_is_refused_with_the_remedy() -> None:
    with pytest.raises(SuiteError, match="has no tool; put @tool above a method"):
        Suite.of(type("Mute", (Environment,), {"start": Base.start}))
    with pytest.raises(SuiteError, match="has no start"):
        Suite.of(type("Idle", (Environment,), {}))
    suite = Suite.of(Base)
    with pytest.raises(SuiteError, match="no level 'hard'; it has default"):
        suite.select("train", "hard")
    with pytest.raises(SuiteError, match="no split 'dev'; there are train, test, ood"):
        suite.select("dev", "default")
    with pytest.raises(SuiteError, match="two suites are called 'base'"):
        InProcessClient([suite, Suite.of(type("Base", (Base,), {}))])


# --- the checker ---------------------------------------------------------------------------------------------------


def examine(suite: Suite | type[Environment], **kwargs: int) -> dict[str, tuple[str, str]]:
    made = suite if isinstance(suite, Suite) else Suite.of(suite)

    async def main() -> list[Verdict]:
        checker = Checker("db", made, made.levels[0], **kwargs)
        return [await checker.run(name) for name in checker.checks]

    return {verdict.check: (verdict.verdict, verdict.detail) for verdict in asyncio.run(main())}


def test_the_checker_finds_what_is_wrong() -> None:
    # tinker-cookbook#643: graders that always pass, or that nothing passes.
    class Impossible(Base):
        async def score(self):
            return 0.0

    class Misspelt(Base):
        async def gold(self):
            return [("sya", {"word": self.task.payload["word"]})]

    class Unjudged(Base):
        async def score(self):
            return "good"

    class Generous(Base):
        async def score(self):
            return 1.0

    class Fickle(Base):
        async def start(self):
            await super().start()
            return f"{time.monotonic_ns()}"

    class Fragile(Base):
        @tool
        async def divide(self, by: int) -> str:
            """Divide."""
            return str(1 // by)

    class Leaky(Base):
        async def start(self):
            self.file = open(__file__)  # noqa: SIM115
            type(self).kept = [*getattr(type(self), "kept", []), self.file]
            return await super().start()

    class Memorised(Base):
        @classmethod
        def tasks(cls, split, level):
            return TaskList(20, lambda i: cls.make_task(split, level, i, {"word": f"{i}"}))

    class Unlimited(Base):
        limits = Limits(act_s=1e6)

    class Untagged(Base):
        @classmethod
        def tasks(cls, split, level):
            return TaskList(20, lambda i: cls.make_task("none", level, i, {"word": f"{split} {i}"}))

    expected = {
        Impossible: ("gold", "does not succeed: it ends as completed with reward 0.0"),
        Misspelt: ("gold", "turn 1, sya, was answered \"Error: there is no tool 'sya'; the tools are say\""),
        Unjudged: ("noop", "breaks when nothing is done (judge): TypeError: Unjudged.score returned str"),
        Generous: ("noop", "scores 1.0; noop_score says 0"),
        Fickle: ("determinism", "self.rng only"),
        Fragile: ("robustness", "ZeroDivisionError"),
        Leaky: ("leaks", "more open files"),
        Memorised: ("splits", "what is measured was trained on"),
        Unlimited: ("deadlines", "limits.act_s"),
        Untagged: ("tasks", "calls itself"),
    }
    for environment, (check, text) in expected.items():
        verdict, detail = examine(environment, tasks=3)[check]
        assert verdict == "failed" and text in detail, (environment, check, detail)


def test_doctor_passes_the_example_and_prints_a_verdict_a_check() -> None:
    result = CliRunner().invoke(app, ["env", f"{EXAMPLES / 'shop.py'}:Shop", "--tasks", "4"])
    assert result.exit_code == 0, result.output
    for check in ("schemas", "gold", "noop", "single use", "determinism", "worker", "deadlines", "leaks", "splits"):
        assert any(line.split()[0] == "ok" and check in line for line in result.output.splitlines()[1:]), check
    assert "doing nothing scores 0" in result.output


def test_doctor_fails_a_broken_environment_and_refuses_a_missing_one(tmp_path: Path) -> None:
    broken = (EXAMPLES / "shop.py").read_text().replace("float(self.bought == min", "float(self.bought != min")
    (tmp_path / "shop.py").write_text(broken)
    result = CliRunner().invoke(app, ["env", f"{tmp_path / 'shop.py'}:Shop", "--tasks", "2", "--json"])
    assert result.exit_code == 1
    (report,) = json.loads(result.output)
    assert not report["ok"] and {v["check"]: v["verdict"] for v in report["verdicts"]}["gold"] == "failed"
    missing = CliRunner().invoke(app, ["env", "chess"])
    assert missing.exit_code == 2 and len(missing.output.strip().splitlines()) == 1


def test_the_documented_example_is_the_file_that_runs() -> None:
    page = (EXAMPLES.parent / "docs" / "environments.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert code.strip() in (EXAMPLES / "shop.py").read_text()


# --- import cost ---------------------------------------------------------------------------------------------------


def test_importing_springtide_costs_under_60_ms_and_pulls_in_nothing_heavy() -> None:
    clock = "import time; t = time.perf_counter(); import springtide; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", clock], capture_output=True, text=True, check=True) for _ in range(7)]
    assert min(float(run.stdout) for run in runs) < 0.060
    code = "import springtide.env, sys; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = (
        "import sys, springtide.env.worker, springtide.env.local, springtide.env.check; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_resolve_lazily() -> None:
    code = (
        "import springtide; from springtide import Environment, Suite, Task, tool; "
        "import springtide.env as e; [getattr(e, n) for n in e.__all__]; print(Task.__name__)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "Task\n"
    import springtide

    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        springtide.trian  # noqa: B018


def test_a_slice_of_a_task_list_is_a_lazy_list_of_the_same_tasks() -> None:
    made: list[int] = []

    def make(index: int):
        made.append(index)
        return Base.make_task("train", "default", index, {"word": "a"})

    every = TaskList(20, make)
    for chosen in (every[5:9], every[::-3], every[:0], every[15:][1:3]):
        assert made == [] and isinstance(chosen, TaskList)
        wanted = list(range(20)[5:9] if len(chosen) == 4 else range(20)[::-3] if len(chosen) == 7 else [16, 17])
        assert [task.index for task in chosen] == wanted[: len(chosen)]
        made.clear()


def test_a_suite_asks_its_author_for_a_list_once_however_many_episodes_it_opens() -> None:
    """One that reads a file, or slices another's list, did so for each episode."""
    asked: list[str] = []

    class Counted(Base):
        @classmethod
        def tasks(cls, split, level):
            asked.append(split)
            return super().tasks(split, level)

    suite = Suite.of(Counted)
    refs = [task.ref for split in ("train", "test") for task in suite.select(split, None)[:3]]
    asked.clear()
    assert [suite.task(ref).ref for ref in refs * 2] == refs * 2
    assert asked == ["train", "test"]
