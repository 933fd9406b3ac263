"""What household's errands mean: when each holds and when it does not, in a house of two rooms that is acted in."""

from __future__ import annotations

import json

import pytest

from springtide.suites.household.goals import Errand, Errands, Want
from springtide.suites.household.world import Entered, Impossible, World

HOUSE = [
    ("kitchen 1", ["counter 1", "fridge 1", "microwave 1", "sink 1", "table 1"], ["bedroom 1"]),
    ("bedroom 1", ["bed 1", "drawer 1", "table 2", "desk 1"], ["kitchen 1"]),
]
ITEMS = [
    *[(f"tomato {n}", "", "counter 1") for n in (1, 2, 3)],
    ("knife 5", "", "counter 1"),
    ("pan 1", "", "counter 1"),
    ("cup 9", "", "bed 1"),
    ("nightlight 1", "", "desk 1"),
    ("nightlight 2", "", "counter 1"),
]


def after(script: str) -> World:
    """A world in which "tool value; tool value" was done."""
    world = World([place for _, inside, _ in HOUSE for place in inside], ITEMS, HOUSE)
    for step in filter(None, script.split("; ")):
        tool, _, value = step.partition(" ")
        world.act(tool, {{"go": "place", "open": "place", "shut": "place", "put": "place"}.get(tool, "object"): value})
    return world


def holds(errand: Errand, script: str) -> bool:
    assert not errand.holds(after(""))
    return errand.holds(after(script))


def test_one_reaches_only_the_places_of_the_room_one_is_in_and_rooms_by_their_doors():
    world = after("")
    with pytest.raises(Impossible, match="there is no bed 1 in kitchen 1"):
        world.act("go", {"place": "bed 1"})
    with pytest.raises(Impossible, match="there is no attic 1 in kitchen 1"):
        world.act("go", {"place": "attic 1"})
    with pytest.raises(Impossible, match="you are in kitchen 1"):
        world.act("go", {"place": "kitchen 1"})
    world.act("go", {"place": "counter 1"})
    assert world.act("go", {"place": "bedroom 1"}) == Entered("bedroom 1", tuple(HOUSE[1][1]), ("kitchen 1",))
    with pytest.raises(Impossible, match="you see no tomato 1"):  # the counter stayed behind
        world.act("take", {"object": "tomato 1"})


def test_slicing_wants_a_blade_in_the_hand_and_a_thing_before_one_that_can_be_sliced():
    for script, object, reason in (
        ("go counter 1", "tomato 1", "you hold no blade"),
        ("go counter 1; take pan 1", "tomato 1", "you hold no blade"),
        ("go counter 1; take knife 5", "pan 1", "you cannot slice pan 1"),
        ("go counter 1; take knife 5; go sink 1", "tomato 1", "you see no tomato 1"),
        ("go counter 1; take knife 5; slice tomato 1", "tomato 1", "tomato 1 is sliced"),
    ):
        with pytest.raises(Impossible, match=reason):
            after(script).act("slice", {"object": object})
    assert after("go counter 1; take knife 5; slice tomato 1").items["tomato 1"].states == {"sliced"}


SLICE = "go counter 1; take knife 5; slice tomato 1; put counter 1; take tomato 1; "


def test_two_states_are_wanted_of_one_and_the_same_object():
    errand = Errand("both", "table", "", (Want("tomato", ("hot", "sliced")),))
    assert holds(errand, SLICE + "go microwave 1; heat tomato 1; go table 1; put table 1")
    assert not holds(errand, SLICE + "go table 1; put table 1")
    other = "go counter 1; take tomato 2; go microwave 1; heat tomato 2; go table 1; put table 1"
    assert not holds(errand, SLICE + "go table 1; put table 1; " + other)


def test_two_things_in_two_states_go_to_the_same_place():
    errand = Errand("pair", "table", "", (Want("tomato", ("hot",)), Want("cup", ("cold",))))
    hot = "go counter 1; take tomato 1; go microwave 1; heat tomato 1; go table 1; put table 1; "
    cold = "go bedroom 1; go bed 1; take cup 9; go kitchen 1; go fridge 1; cool cup 9; "
    assert holds(errand, hot + cold + "go table 1; put table 1")
    assert not holds(errand, hot + cold + "go bedroom 1; go table 2; put table 2")  # another table
    assert not holds(errand, hot + cold.replace("fridge 1; cool", "microwave 1; heat") + "go table 1; put table 1")


def test_a_kind_of_room_is_meant():
    errand = Errand("place", "table", "bedroom", (Want("tomato"),))
    fetch = "go counter 1; take tomato 1; "
    assert holds(errand, fetch + "go bedroom 1; go table 2; put table 2")
    assert not holds(errand, fetch + "go table 1; put table 1")


def test_what_is_stowed_has_to_be_shut_away():
    errand = Errand("stow", "drawer", "", (Want("cup"),), shut=True)
    put = "go bedroom 1; go bed 1; take cup 9; go drawer 1; open drawer 1; put drawer 1"
    assert not holds(errand, put)
    assert holds(errand, put + "; shut drawer 1")
    assert not holds(errand, put + "; take cup 9; shut drawer 1")
    assert not holds(errand, put + "; shut drawer 1; open drawer 1")


def test_a_count_wants_so_many_at_one_place_and_an_exact_one_no_more_and_an_empty_hand():
    two = Errand("two", "table", "", (Want("tomato", (), 2),))
    bring = "go counter 1; take tomato {0}; go table 1; put table 1; "
    assert not holds(two, bring.format(1))
    assert not holds(two, bring.format(1) + "go counter 1; take tomato 2; go bedroom 1; go table 2; put table 2")
    assert holds(two, bring.format(1) + bring.format(2))
    assert holds(two, bring.format(1) + bring.format(2) + bring.format(3))

    exact = Errand("exact", "counter 1", "", (Want("tomato", (), 2, True),))
    assert not holds(exact, "go counter 1; take tomato 1")
    assert holds(exact, bring.format(1))
    assert not holds(exact, bring.format(1) + bring.format(2))
    assert not holds(exact, bring.format(1) + "go counter 1; take tomato 2")


def test_a_lamp_is_lit_in_the_kind_of_room_asked_for_and_looked_by_with_the_right_thing_in_hand():
    light = Errand("light", "nightlight", "bedroom")
    assert holds(light, "go bedroom 1; go desk 1; use nightlight 1")
    assert not holds(light, "go counter 1; use nightlight 2")
    look = Errand("look", "nightlight", "", (Want("cup", ("clean",)),))
    fetch = "go bedroom 1; go bed 1; take cup 9; "
    washed = fetch + "go kitchen 1; go sink 1; clean cup 9; "
    assert holds(look, washed + "go counter 1; use nightlight 2")
    assert not holds(look, fetch + "go desk 1; use nightlight 1")
    assert not holds(look, washed + "go bedroom 1; go desk 1")


def test_several_errands_have_to_hold_at_the_same_time():
    place = Errand("place", "table", "", (Want("pan"),))
    light = Errand("light", "nightlight", "")
    goal = Errands((place, light))
    done = "go counter 1; use nightlight 2; take pan 1; go table 1; put table 1"
    assert goal.holds(after(done))
    assert not goal.holds(after(done + "; take pan 1"))
    assert not goal.holds(after(done.replace("use nightlight 2; ", "")))
    assert Errands.of(json.loads(json.dumps(goal.to_rows()))) == goal
