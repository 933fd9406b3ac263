"""The suite `kg`: gold, splits, the rules of its tools, its judge, its floor (baselines) and its speed."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.env import EpisodeRunner, Task, load_suite
from springtide.suites.kg import SUITE
from springtide.suites.kg.deep import SHAPES, generate_deep
from springtide.suites.kg.environment import KnowledgeGraph, _questions
from springtide.suites.kg.generate import bucket, generate
from springtide.suites.kg.graph import Graph
from springtide.suites.kg.programs import evaluate, hops, steps
from springtide.suites.kg.schema import COUNTS, QUICK
from springtide.suites.kg.shortcuts import reductions, shortcut
from springtide.suites.kg.spread import FEATURES, SETS, flat, glance, values
from springtide.trace import Outcome

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))  # programs run by path
baselines, kg = importlib.import_module("baselines"), importlib.import_module("kg")

LEVELS = ("quick", "standard", "hard", "expert")
DEEP = ("hard", "expert")
SPLITS = ("train", "test", "ood")
Move, graph, gold, message = kg.Move, kg.graph, kg.gold, kg.message


async def open_task(task: Task) -> EpisodeRunner:
    return await EpisodeRunner.open(KnowledgeGraph(task, graph()))


async def run(task: Task, moves: list[Move]) -> tuple[list[str], Outcome]:
    """Play the moves; the replies and the outcome."""
    runner = await open_task(task)
    replies: list[str] = []
    for i, move in enumerate(moves):
        if runner.ended:
            break
        replies += [m.text for m in (await runner.act(message(move), i)).messages]
    outcome = await runner.finish("done")
    await runner.close()
    return replies, outcome


def play(task: Task, moves: list[Move]) -> tuple[list[str], Outcome]:
    return asyncio.run(run(task, moves))


def sample(level: str, split: str, size: int) -> list[Task]:
    tasks = SUITE.select(split, level)
    return [tasks[i] for i in random.Random(f"{level}/{split}").sample(range(len(tasks)), size)]


def task_where(level: str, test: Callable[[Task], bool]) -> Task:
    return next(t for t in SUITE.select("train", level) if test(t))


def pairs(program: list[Any]) -> set[tuple[str, str]]:
    """The relations a program takes one right after the other."""
    found: set[tuple[str, str]] = set()
    if program[0] == "hop" and program[1][0] == "hop":
        found.add((program[1][2], program[2]))
    for part in program[1:]:
        if isinstance(part, list):
            found |= pairs(part)
    return found


def shape(program: list[Any]) -> str:
    return f"{program[0]}({','.join(shape(p) for p in program[1:] if isinstance(p, list))})"


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_suite_is_found_by_name_and_has_its_levels():
    suite = load_suite("kg")
    assert suite.levels == LEVELS and suite.environment is KnowledgeGraph


@pytest.mark.parametrize("level", LEVELS)
def test_enough_tasks_and_skeletons_at_each_level(level: str):
    splits = {split: SUITE.select(split, level) for split in SPLITS}
    assert sum(map(len, splits.values())) >= 2000 and len(splits["train"]) >= 1200
    skeletons = {split: {t.payload["skeleton"] for t in tasks} for split, tasks in splits.items()}
    assert min(map(len, skeletons.values())) >= 30
    asked = [(t.payload["skeleton"], tuple(t.payload["entities"])) for tasks in splits.values() for t in tasks]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("level", LEVELS)
def test_test_uses_trains_templates_and_other_entities(level: str):
    train, test = SUITE.select("train", level), SUITE.select("test", level)
    assert {t.payload["skeleton"] for t in test} <= {t.payload["skeleton"] for t in train}
    entities = {e for t in train for e in t.payload["entities"]}
    for split in ("test", "ood"):
        assert not entities & {e for t in SUITE.select(split, level) for e in t.payload["entities"]}
    assert all(bucket(e) == "train" for e in entities)


@pytest.mark.parametrize("level", LEVELS)
def test_ood_holds_only_templates_never_seen(level: str):
    seen = [t for split in ("train", "test") for t in SUITE.select(split, level)]
    ood = SUITE.select("ood", level)
    assert not {t.payload["skeleton"] for t in seen} & {t.payload["skeleton"] for t in ood}
    programs = [t.payload["program"] for t in seen]
    seen_pairs = set().union(*map(pairs, programs))
    seen_steps = {step for p in programs for step in steps(p)}
    seen_shapes = {shape(p) for p in programs}
    new = [
        t
        for t in ood
        if pairs(t.payload["program"]) - seen_pairs
        or set(steps(t.payload["program"])) - seen_steps
        or shape(t.payload["program"]) not in seen_shapes
    ]
    assert len(new) >= 0.4 * len(ood)  # the rest are new wordings of what was seen


def test_a_tenth_of_train_is_dev():
    for level in LEVELS:
        assert all(("dev" in t.tags) == (t.index % 10 == 9) for t in SUITE.select("train", level))
        assert not any(t.tags for t in SUITE.select("test", level))


def test_tasks_are_the_same_each_time_and_the_names_in_them_exist():
    for level in LEVELS:
        first, again = (SUITE.select("test", level)[7] for _ in range(2))
        assert first == again and first.id == f"kg/{level}/test/7"
        for task in sample(level, "train", 100):
            assert all(graph().kind(e) for e in task.payload["entities"])


@pytest.mark.slow
@pytest.mark.parametrize(("write", "file"), [(generate, "questions"), (generate_deep, "deep")])
def test_writing_the_questions_again_gives_the_same_questions(write: Callable[[], Any], file: str):
    assert json.loads(json.dumps(write())) == _questions(file)


# --- gold ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("level", LEVELS)
def test_gold_scores_one_within_the_turns(level: str, split: str):
    async def all_of_them() -> None:
        for task in sample(level, split, 120):
            moves = gold(task)
            limit = (task.limits or KnowledgeGraph.limits).max_turns
            assert 4 <= len(moves) <= limit
            replies, outcome = await run(task, moves)
            assert (outcome.status, outcome.reward, outcome.success) == ("completed", 1.0, True), (task, replies)

    asyncio.run(all_of_them())


def test_gold_reaches_authors_of_train_tasks_only():
    async def asks(split: str) -> Any:
        runner = await open_task(SUITE.select(split, "quick")[0])
        return await runner.gold()

    assert asyncio.run(asks("train"))[0].name == "get_relations"
    with pytest.raises(PermissionError):
        asyncio.run(asks("test"))


@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_exists_and_no_single_relation_gives_it(level: str):
    for split in SPLITS:
        for task in sample(level, split, 150):
            entities = task.payload["entities"]
            answer = evaluate(task.payload["program"], entities, graph())
            assert answer
            if task.payload["program"][0] != "count":
                for entity in entities:
                    assert answer not in [graph().follow([entity], r) for r in graph().relations([entity], level)]


def test_quick_is_short():
    tasks = SUITE.select("train", "quick")
    assert len({r for names in QUICK.values() for r in names}) <= 20
    lengths = []
    for task in sample("quick", "train", 150):
        moves = gold(task)
        assert len(moves) - 1 >= 3
        assert all(len(e) <= 10 for e in task.payload["entities"])
        replies, _ = play(task, moves)
        assert all(reply.count(" ") <= 4 for reply in replies)
        said = ["".join((name, *map(str, arguments.values()))) for name, arguments in moves]
        lengths.append(sum(map(len, (*said, *replies, task.payload["skeleton"], *task.payload["entities"]))))
    assert statistics.mean(lengths) <= 380 - 80  # the signatures of three tools take the rest
    assert len(tasks) >= 1200


def test_order_of_relations_is_shuffled_by_task_and_kept_within_a_group():
    orders = Counter()
    for task in SUITE.select("train", "quick"):
        if graph().kind(task.payload["entities"][0]) == "city":
            moves = [("get_relations", {"variable": task.payload["entities"][0]})]
            first, again = play(task, moves)[0], play(task, moves)[0]
            assert first == again
            orders[first[0].split()[0]] += 1
        if orders.total() == 120:
            break
    assert len(orders) == 4 and max(orders.values()) < 0.5 * orders.total()


# --- depth -----------------------------------------------------------------------------------------------------------


def kinds_of_step(program: list[Any]) -> Counter[str]:
    inner = sum((kinds_of_step(p) for p in program[1:] if isinstance(p, list)), Counter())
    return inner + Counter([program[0]])


@pytest.mark.parametrize("level", DEEP)
def test_deep_levels_compose_every_operation_over_three_and_four_relations(level: str):
    programs = [t.payload["program"] for split in SPLITS for t in SUITE.select(split, level)]
    assert {hops(p) for p in programs} == {3 if level == "hard" else 4}
    used = Counter(op for p in programs for op in kinds_of_step(p))
    assert min(used[op] for op in ("and", "count", "max", "min", "above", "below")) >= 50
    other = [sum(n for op, n in kinds_of_step(p).items() if op not in ("hop", "entity")) for p in programs]
    assert min(other) >= (1 if level == "hard" else 2)
    assert any(name.endswith(" count") for p in programs for name in steps(p))
    assert len({json.dumps(p) for p in programs}) >= 150


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("level", DEEP)
def test_no_deep_answer_has_a_shortcut_of_fewer_steps(level: str, split: str):
    for task in sample(level, split, 25):
        assert shortcut(task.payload["program"], task.payload["entities"], graph()) is None, task


@pytest.mark.slow
@pytest.mark.parametrize("level", DEEP)
def test_no_deep_answer_at_all_has_a_shortcut_and_all_gold_is_right(level: str):
    async def all_of_them() -> None:
        for task in (t for split in SPLITS for t in SUITE.select(split, level)):
            assert shortcut(task.payload["program"], task.payload["entities"], graph()) is None, task
            assert (await run(task, gold(task)))[1].success is True, task

    asyncio.run(all_of_them())


def test_a_shortcut_is_found_where_there_is_one():
    spain: list[Any] = ["hop", ["entity", 0], "neighbour"]
    largest = ["max", spain, "area"]
    assert shortcut(["hop", largest, "continent"], ["Spain"], graph())  # every one of them, but for Morocco, and so on
    # A second relation that changes nothing: the capital's country is the country.
    assert shortcut(["hop", ["hop", spain, "capital"], "country"], ["Spain"], graph())
    # An intersection whose second half says nothing new.
    europe = ["hop", ["entity", 1], "country"]
    assert shortcut(["and", ["hop", ["entity", 0], "neighbour"], europe], ["Portugal", "Europe"], graph())
    # A chain of other relations that leads there in fewer steps: London governs the country it is in.
    through = ["hop", ["hop", ["hop", ["entity", 0], "city"], "seat of"], "currency"]
    assert shortcut(through, ["LHR"], graph()) == "2 relations from LHR lead to it"
    # Two such chains that meet in it.
    governed = ["hop", ["hop", ["hop", ["entity", 0], "city"], "seat of"], "neighbour"]
    meet = ["and", governed, ["hop", ["entity", 1], "country"]]
    assert shortcut(meet, ["CDG", "German"], graph()) == "2 relations from CDG meet 1 from German in it"


def test_reductions_drop_steps_and_keep_a_count():
    program = ["count", ["max", ["hop", ["hop", ["entity", 0], "a"], "b"], "size"]]
    assert all(p[0] == "count" for p in reductions(program)) and program not in reductions(program)
    assert ["count", ["hop", ["entity", 0], "b"]] in reductions(program)
    assert len(reductions(program)) == 7


def test_comparisons_need_the_attribute_listed_and_one_thing_to_compare_with():
    payload = {"skeleton": "? {0} {1}", "entities": ["France", "Portugal"], "program": [
        "above", ["hop", ["entity", 0], "neighbour"], "area", ["entity", 1]]}  # fmt: skip
    task = KnowledgeGraph.make_task("train", "hard", 0, payload)
    look, follow, attributes, compare, answer = gold(task)
    less = ("below", compare[1])
    at = {"variable": "#0", "attribute": "area"}
    many, itself = ("above", {**at, "than": "#0"}), ("above", {**at, "than": "#1"})
    replies, outcome = play(task, [look, follow, compare, attributes, compare, less, many, itself, answer])
    assert replies[2].startswith("call get_attributes(#0) first")
    assert set(replies[3].split(", ")) >= {"area", "population", "airport count", "neighbour count"}
    bigger, smaller = replies[4], replies[5]
    assert bigger == "#1: 3 countries (Germany, Italy, Spain)"
    assert smaller == "#2: 5 countries (Andorra, Belgium, Luxembourg, ...)"
    neighbours = len(graph().follow(["France"], "neighbour"))
    assert replies[6] == f"#0 holds {neighbours} things; compare with one thing that has a value of area"
    assert replies[7].startswith("#1 holds ")
    assert outcome.success is True


def test_a_count_of_neighbours_is_an_attribute_at_the_deep_levels_alone():
    assert "airport count" not in graph().attributes(["France"], "standard")
    assert graph().attributes(["France"], "hard")["airport count"] is COUNTS["country"]["airport count"]
    assert graph().value("France", "airport count") == len(graph().follow(["France"], "airport"))
    assert graph().value("Monaco", "discovery count") == 0
    assert "airport" not in COUNTS and "capital count" not in COUNTS["country"]  # there is one at most


def test_a_deep_text_names_each_entity_once_and_closes_every_phrase():
    for level in DEEP:
        for task in sample(level, "train", 100):
            text = task.payload["skeleton"]
            assert len(re.findall(r"\{\d\}", text)) == len(task.payload["entities"]) >= 1
            counted = kinds_of_step(task.payload["program"])
            assert text.count(" both among ") == counted["and"]
            assert text.count(" than ") == counted["above"] + counted["below"]
            assert set("".join(SHAPES[level]["seen"])) <= set("haAegGc")


# --- rules of the tools ----------------------------------------------------------------------------------------------


def quick_two_hop() -> Task:
    return task_where("quick", lambda t: t.payload["program"][0] == "hop")


def test_a_relation_must_be_listed_before_it_is_followed():
    task = quick_two_hop()
    (_, look), (_, follow), *_ = gold(task)
    replies, outcome = play(task, [("get_neighbors", follow), ("get_relations", look), ("get_neighbors", follow)])
    assert replies[0] == f"call get_relations({look['variable']}) first: what it lists can be used"
    assert replies[2].startswith("#0: ")
    assert outcome.reward == 0.0


def test_listing_one_variable_does_not_list_another():
    task = quick_two_hop()
    moves = gold(task)
    replies, _ = play(task, [*moves[:2], moves[3]])  # the second hop, without its lookup
    assert "call get_relations(#0) first" in replies[-1]


def test_errors_name_what_was_given_and_what_there_is():
    task = quick_two_hop()
    name = task.payload["entities"][0]
    replies, _ = play(
        task,
        [
            ("get_relations", {"variable": "Atlantis"}),
            ("get_relations", {"variable": "#3"}),
            ("get_relations", {"variable": name}),
            ("get_neighbors", {"variable": name, "relation": "ruler"}),
        ],
    )
    assert replies[0] == f"'Atlantis' is neither a variable nor an entity of the question; there are: {name}"
    assert replies[1] == "there is no variable '#3'; there are: none yet"
    assert replies[3] == f"get_relations({name}) did not list 'ruler'; it listed: {', '.join(replies[2].split())}"


def test_a_number_has_no_relations():
    task = task_where("quick", lambda t: t.payload["program"][0] == "count")
    replies, _ = play(task, [*gold(task)[:-1], ("get_relations", {"variable": "#1"})])
    assert replies[-1] == "#1 is a number; it has no relations or attributes"


def made_task(entities: list[str], program: list[Any]) -> Task:
    payload = {"skeleton": "? {0}", "entities": entities, "program": program}
    return KnowledgeGraph.make_task("train", "standard", 0, payload)


def test_intersection_of_nothing_in_common_makes_no_variable():
    task = made_task(["Japan", "Peru"], ["and", ["hop", ["entity", 0], "currency"], ["hop", ["entity", 1], "language"]])
    look = [("get_relations", {"variable": name}) for name in ("Japan", "Peru")]
    follow = [("get_neighbors", {"variable": v, "relation": r}) for v, r in
              (("Japan", "currency"), ("Peru", "currency"), ("Peru", "language"))]  # fmt: skip
    meet = [("intersection", {"a": "#0", "b": other}) for other in ("#1", "#2", "#9")]
    replies, _ = play(task, [*look, *follow, *meet, ("count", {"variable": "#0"})])
    assert replies[5] == "#0 and #1 have nothing in common; no variable was made"
    assert replies[6] == "#0 holds currencies and #2 languages; only the same type can have a common part"
    assert replies[7] == "there is no variable '#9'; there are: #0, #1, #2"
    assert replies[8] == "#3: 1"


def test_argmax_and_argmin_need_the_attribute_listed_and_find_the_ends():
    task = made_task(["France"], ["max", ["hop", ["entity", 0], "neighbour"], "area"])
    start = gold(task)[:2]
    use = ("argmax", {"variable": "#0", "attribute": "area"})
    look = ("get_attributes", {"variable": "#0"})
    replies, _ = play(task, [*start, use, look, use, ("argmin", use[1]), ("argmax", {**use[1], "attribute": "age"})])
    assert replies[2].startswith("call get_attributes(#0) first")
    assert sorted(replies[3].split(", ")) == ["area", "population"]
    assert replies[4:6] == ["#1: 1 country (Spain)", "#2: 1 country (Monaco)"]
    assert "did not list 'age'" in replies[6]


def test_quick_offers_three_tools_standard_seven_and_deeper_levels_comparisons():
    async def names(level: str) -> list[str]:
        runner = await open_task(SUITE.select("train", level)[0])
        return [t["function"]["name"] for t in runner.tools]

    assert asyncio.run(names("quick")) == ["get_relations", "get_neighbors", "count"]
    assert sorted(asyncio.run(names("standard"))) == [
        "argmax", "argmin", "count", "get_attributes", "get_neighbors", "get_relations", "intersection"]  # fmt: skip
    assert set(asyncio.run(names("hard"))) - set(asyncio.run(names("standard"))) == {"above", "below"}


# --- the judge -------------------------------------------------------------------------------------------------------


def test_an_answer_is_a_set_no_more_and_no_less():
    # All neighbours are asked for; the currencies of Japan's one would be a subset of nothing, so use real supersets.
    task = made_task(["Spain"], ["hop", ["hop", ["entity", 0], "neighbour"], "continent"])
    walk = [
        ("get_relations", {"variable": "Spain"}),
        ("get_neighbors", {"variable": "Spain", "relation": "neighbour"}),
        ("get_neighbors", {"variable": "Spain", "relation": "continent"}),
        ("get_relations", {"variable": "#0"}),
        ("get_neighbors", {"variable": "#0", "relation": "continent"}),
    ]
    assert graph().follow(["Spain"], "continent") < graph().follow(graph().follow(["Spain"], "neighbour"), "continent")
    answers = {f"#{k}": play(task, [*walk, ("", {"text": f"Final Answer: #{k}"})])[1] for k in range(3)}
    assert [answers[k].reward for k in ("#0", "#1", "#2")] == [0.0, 0.0, 1.0]
    assert 0 < next(c.value for c in answers["#1"].checks if c.name == "f1") < 1


def test_another_route_to_the_same_set_is_right():
    task = made_task(["LHR"], ["hop", ["hop", ["entity", 0], "city"], "country"])
    look, follow = ("get_relations", {"variable": "LHR"}), ("get_neighbors", {"variable": "LHR", "relation": "country"})
    assert play(task, [look, follow, ("", {"text": "So. Final Answer: #0"})])[1].success is True


def test_text_without_an_answer_is_reminded_and_an_unknown_variable_is_a_wrong_answer():
    task = quick_two_hop()
    replies, outcome = play(task, [("", {"text": "I think it is Paris."}), ("", {"text": "Final Answer: #5"})])
    assert "Final Answer: #k" in replies[0]
    assert (outcome.status, outcome.reward, outcome.success) == ("completed", 0.0, False)


def test_doing_nothing_scores_the_declared_score():
    assert play(quick_two_hop(), [])[1].reward == KnowledgeGraph.noop_score


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40), level=st.sampled_from(LEVELS))
def test_any_text_is_answered_never_an_environment_error(text: str, level: str):
    task = SUITE.select("train", level)[0]
    moves = [("get_relations", {"variable": text}), ("get_neighbors", {"variable": text, "relation": text}),
             ("count", {"variable": text}), ("", {"text": text})]  # fmt: skip
    _, outcome = play(task, moves)
    assert outcome.status != "environment_error" and outcome.reward == 0.0


# --- floors ----------------------------------------------------------------------------------------------------------

# What a policy that does not read may reach on 150 tasks of `test`, in percent; benchmarks/kg.py asks for 10 on more
# tasks. `quick` and `standard` are frozen, with plans that some types of entity tell a lot about.
MOST = {("quick", "plan type"): 30, ("standard", "plan type"): 25, ("quick", "type"): 18}
GLANCING = [name for name in kg.POLICIES if name.startswith("plan ") and name != "plan type"]


def percent_won(level: str, name: str) -> float:
    tasks = kg.sample(level, "test", 150)
    won = asyncio.run(kg.successes(kg.POLICIES[name], tasks))
    print(f"{level} {name}: {won} of {len(tasks)}")
    return 100 * won / len(tasks)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in kg.POLICIES if name not in GLANCING])
def test_policies_that_do_not_read_fail(level: str, name: str):
    assert percent_won(level, name) <= MOST.get((level, name), 12)


@pytest.mark.slow
@pytest.mark.parametrize("level", DEEP)
@pytest.mark.parametrize("name", GLANCING)
def test_no_plan_by_what_a_glance_shows_answers_deep_questions(level: str, name: str):
    """Two features together tell more than was aimed at (docs/kg.md); no more than this, though."""
    assert percent_won(level, name) <= (24 if "+" in name else 12)


@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("level", DEEP)
def test_no_plan_is_common_among_deep_questions_that_look_alike(level: str, names: tuple[str, ...]):
    plans: dict[Any, Counter[str]] = {}
    for task in SUITE.select("train", level):
        plans.setdefault(kg.cell(task, names), Counter())[json.dumps(task.payload["program"])] += 1
    asked = sum(of_cell.total() for of_cell in plans.values())
    assert sum(max(of_cell.values()) for of_cell in plans.values()) <= (0.05 if len(names) == 1 else 0.14) * asked


looks = st.fixed_dictionaries(
    {name: st.integers(0, 3) for name in FEATURES} | {"operators": st.sampled_from([("max",), ("min",), ("count",)])}
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(looks, st.sampled_from("abcde")), max_size=60),
    st.floats(0.05, 1),
    st.floats(0.05, 1),
    st.integers(0, 4),
)
def test_one_program_a_look_is_right_for_few_of_the_templates_left(
    made: list[tuple[Any, str]], one: float, two: float, least: int
):
    def even(among: list[int]) -> bool:
        for names in SETS:
            plans: dict[Any, Counter[str]] = {}
            for i in among:
                plans.setdefault(values(made[i][0], names), Counter())[made[i][1]] += 1
            if sum(max(p.values()) for p in plans.values()) > (one if len(names) == 1 else two) * len(among):
                return False
        return True

    everything = list(range(len(made)))
    kept = flat([look for look, _ in made], [program for _, program in made], one, two, least)
    assert even(kept) and kept == sorted(set(kept))
    counting = [sum(made[i][0]["operators"] == ("count",) for i in among) for among in (kept, everything)]
    assert not kept or counting[0] >= min(least, counting[1])
    assert not even(everything) or kept == everything


def test_a_glance_sees_types_operators_and_length_and_no_relation():
    task = task_where("expert", lambda t: [t.payload["program"][0], t.payload["program"][1][0]] == ["count", "above"])
    program, text, entities = (task.payload[key] for key in ("program", "skeleton", "entities"))
    seen = glance(program, text, entities, evaluate(program, entities, graph()), graph())
    assert set(seen) == set(FEATURES)
    assert (seen["type"], seen["asked"]) == (graph().kind(entities[0]), "number")
    assert seen["operators"][:2] == ("count", "above")


def test_the_page_shows_what_was_measured():
    stored = json.loads((Path(kg.__file__).with_name("results") / "kg.json").read_text())
    assert baselines.policy_table(stored) in baselines.page("kg").read_text()


def test_a_policy_that_reads_passes_the_same_measure():
    def reads(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
        return gold(runner.environment.task)[turn]

    assert asyncio.run(kg.successes(reads, kg.sample("expert", "test", 20))) == 20


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_levels_whole_catalogue_takes_less_than_two_seconds(level: str):
    _questions.cache_clear()
    began = time.process_time()
    made = sum(1 for split in SPLITS for _ in SUITE.select(split, level))
    assert made >= 2000 and time.process_time() - began < 2


def test_loading_starting_and_acting_are_fast():
    began = time.process_time()
    Graph()
    load_s = time.process_time() - began
    starts, acts = [], []

    async def measure() -> None:
        for level in LEVELS:
            for task in sample(level, "train", 60):
                began = time.perf_counter()
                runner = await open_task(task)
                starts.append(time.perf_counter() - began)
                for i, move in enumerate(gold(task)):
                    began = time.perf_counter()
                    await runner.act(message(move), i)
                    acts.append(time.perf_counter() - began)
                await runner.close()

    asyncio.run(measure())
    ms = [1e3 * seconds for seconds in sorted(acts)]
    print(f"load {load_s:.2f} s, start {1e3 * statistics.median(starts):.2f} ms")
    print(f"act {statistics.median(ms):.2f} ms, mean {statistics.mean(ms):.2f}, 99th {ms[int(0.99 * len(ms))]:.2f}")
    assert load_s < 2
    assert statistics.median(starts) < 0.005 and statistics.median(acts) < 0.002
