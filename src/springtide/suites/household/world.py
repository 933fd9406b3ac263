"""The household's world: places, objects and one agent, changed by actions and seen only from where the agent stands.

Owns an episode's state. Invariants: each object is in exactly one place or in the agent's hand; the hand holds at most
one; the contents of a place leave the world only through `Seen`, which the agent gets by standing there with the place
open; an action that is impossible changes nothing. Deterministic: there is no chance after the task is drawn.
Called by: `environment` (the tools), `generate` (verifying the expert), and the tests' random policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from springtide.suites.household.tables import RECEPTACLES, THINGS, Receptacle, Thing

Call = tuple[str, dict[str, str]]

TOOLS: dict[str, tuple[str, ...]] = {
    "quick": ("go", "open", "take", "put", "heat", "cool", "clean"),
    "standard": (*("go", "open", "shut", "take", "put", "heat", "cool", "clean", "use", "examine", "inventory"),),
}
_LETTER = {"heat": "h", "cool": "c", "clean": "w"}
_BECOMES = {"heat": ("hot", "cold"), "cool": ("cold", "hot"), "clean": ("clean", "")}  # gained, lost


class Impossible(Exception):
    """An action that cannot be done now. The text says why, in the agent's terms; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the agent sees at a place: names in the order they lie there, or None while the place is closed."""

    place: str
    prep: str
    names: tuple[str, ...] | None
    opened: bool = False  # this look came with opening it


@dataclass(frozen=True, slots=True)
class Done:
    """An action that worked and shows nothing new. `text` tells what happened, for the wordy level."""

    text: str


Result = Seen | Done


@dataclass(slots=True)
class Place:
    name: str
    kind: Receptacle
    is_open: bool
    holds: list[Item] = field(default_factory=list)


@dataclass(slots=True)
class Item:
    name: str
    kind: Thing
    colour: str
    place: Place | None  # None: in the agent's hand
    states: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        """How the item looks: "red cup" where it has a colour, else its name."""
        return f"{self.colour} {self.name}" if self.colour else self.name


@dataclass(frozen=True, slots=True)
class Goal:
    """What has to hold. kind: place, heat, cool, clean, look or two. `place` is a receptacle kind (look: a lamp kind).

    The object is known by its colour where one is given, else by its kind.
    """

    kind: str
    thing: str
    colour: str
    place: str

    def wants(self, item: Item) -> bool:
        return item.colour == self.colour if self.colour else item.kind.name == self.thing

    def holds(self, world: World) -> bool:
        if self.kind == "look":
            held, at = world.held, world.at
            return (
                held is not None
                and at is not None
                and self.wants(held)
                and any(i.kind.name == self.place and "lit" in i.states for i in at.holds)
            )
        state = _BECOMES[self.kind][0] if self.kind in _BECOMES else ""
        there = sum(
            item.place is not None
            and item.place.kind.name == self.place
            and self.wants(item)
            and (not state or state in item.states)
            for item in world.items.values()
        )
        return there >= (2 if self.kind == "two" else 1)


def kind_of(name: str) -> str:
    """The kind of a named place or object: "drawer" for "drawer 2"."""
    return name.partition(" ")[0]


class World:
    """One household. `places`: names in listed order. `items`: (name, colour, place name), in the order they lie."""

    def __init__(self, places: list[str], items: list[tuple[str, str, str]]) -> None:
        kinds = {name: RECEPTACLES[kind_of(name)] for name in places}
        self.places = {name: Place(name, kind, not kind.closed) for name, kind in kinds.items()}
        self.items: dict[str, Item] = {}
        self.at: Place | None = None
        self.held: Item | None = None
        for name, colour, place in items:
            item = Item(name, THINGS[kind_of(name)], colour, self.places[place])
            self.items[name] = item
            self.places[place].holds.append(item)

    def act(self, tool: str, arguments: dict[str, str]) -> Result:
        """Do one action. Raises: Impossible (nothing changed), KeyError for a tool that does not exist."""
        return _ACTIONS[tool](self, **arguments)

    def go(self, place: str) -> Result:
        target = self._place(place)
        if target is self.at:
            raise Impossible(f"you are at {place}")
        self.at = target
        return self._look(target)

    def open(self, place: str) -> Result:
        target = self._here(place)
        if not target.kind.closed or target.is_open:
            raise Impossible(f"{place} is open")
        target.is_open = True
        return self._look(target, opened=True)

    def shut(self, place: str) -> Result:
        target = self._here(place)
        if not target.kind.closed:
            raise Impossible(f"{place} does not shut")
        if not target.is_open:
            raise Impossible(f"{place} is closed")
        target.is_open = False
        return Done(f"You shut {place}.")

    def take(self, object: str) -> Result:
        if self.held is not None:
            raise Impossible(f"you hold {self.held.name}")
        item = self._visible(object)
        if item.kind.lamp:
            raise Impossible(f"{object} is fixed")
        assert item.place is not None  # it is visible and not held
        source = item.place
        source.holds.remove(item)
        item.place, self.held = None, item
        return Done(f"You take {object} from {source.name}.")

    def put(self, place: str) -> Result:
        if self.held is None:
            raise Impossible("you hold nothing")
        target = self._here(place)
        if not target.is_open:
            raise Impossible(f"{place} is closed")
        item = self.held
        target.holds.append(item)
        item.place, self.held = target, None
        return Done(f"You put {item.name} {target.kind.prep} {place}.")

    def heat(self, object: str) -> Result:
        return self._treat("heat", object)

    def cool(self, object: str) -> Result:
        return self._treat("cool", object)

    def clean(self, object: str) -> Result:
        return self._treat("clean", object)

    def use(self, object: str) -> Result:
        item = self._visible(object)
        if not item.kind.lamp:
            raise Impossible(f"{object} is not a lamp")
        if "lit" in item.states:
            raise Impossible(f"{object} is on")
        item.states.add("lit")
        return Done(f"You switch on {object}.")

    def examine(self, name: str) -> Result:
        if name in self.places:
            return self._look(self._here(name))
        item = self.held if self.held is not None and self.held.name == name else self._visible(name)
        states = sorted(item.states)
        return Done(f"{name} is {' and '.join(states)}." if states else f"There is nothing special about {name}.")

    def inventory(self) -> Result:
        return Done(f"You hold {self.held.name}." if self.held is not None else "You hold nothing.")

    def valid(self, tools: tuple[str, ...]) -> list[Call]:
        """Every action of `tools` that would work now, in a fixed order."""
        here, held = self.at, self.held
        calls: list[Call] = [("go", {"place": name}) for name, place in self.places.items() if place is not here]
        if here is not None:
            seen = here.holds if here.is_open else []
            if here.kind.closed:
                calls.append(("shut" if here.is_open else "open", {"place": here.name}))
            if held is None:
                calls += [("take", {"object": i.name}) for i in seen if not i.kind.lamp]
            else:
                if here.is_open:
                    calls.append(("put", {"place": here.name}))
                if here.kind.does and _LETTER[here.kind.does] in held.kind.can:
                    calls.append((here.kind.does, {"object": held.name}))
            calls += [("use", {"object": i.name}) for i in seen if i.kind.lamp and "lit" not in i.states]
            calls += [("examine", {"name": i.name}) for i in seen]
            calls.append(("examine", {"name": here.name}))
        if held is not None:
            calls.append(("examine", {"name": held.name}))
        calls.append(("inventory", {}))
        return [call for call in calls if call[0] in tools]

    def _treat(self, verb: str, name: str) -> Result:
        held = self.held
        if held is None or held.name != name:
            raise Impossible(f"you do not hold {name}")
        if self.at is None or self.at.kind.does != verb:
            raise Impossible(f"you cannot {verb} here")
        if _LETTER[verb] not in held.kind.can:
            raise Impossible(f"you cannot {verb} {name}")
        gained, lost = _BECOMES[verb]
        held.states.add(gained)
        held.states.discard(lost)
        return Done(f"You {verb} {name} with {self.at.name}.")

    def _place(self, name: str) -> Place:
        if name not in self.places:
            raise Impossible(f"there is no {name}")
        return self.places[name]

    def _here(self, name: str) -> Place:
        place = self._place(name)
        if place is not self.at:
            raise Impossible(f"you are not at {name}")
        return place

    def _visible(self, name: str) -> Item:
        """The item of that name lying in the open where the agent stands; whether it exists elsewhere is not told."""
        item = self.items.get(name)
        if item is None or item.place is None or item.place is not self.at or not item.place.is_open:
            raise Impossible(f"you see no {name}")
        return item

    def _look(self, place: Place, opened: bool = False) -> Seen:
        names = tuple(item.label for item in place.holds) if place.is_open else None
        return Seen(place.name, place.kind.prep, names, opened)


_ACTIONS: dict[str, Callable[..., Result]] = {name: getattr(World, name) for name in TOOLS["standard"]}


def world_of(payload: dict[str, Any]) -> tuple[World, Goal]:
    """A fresh world and its goal, from a task's payload."""
    return World(payload["places"], [tuple(i) for i in payload["items"]]), Goal(**payload["goal"])
