"""The household's world: places, objects and one agent, changed by actions and seen only from where the agent stands.

At `quick` and `standard` it is one room; at the deeper levels a house of rooms joined by doors, where the agent reaches
only the places of the room that it is in.

Owns an episode's state. Invariants: each object is in exactly one place or in the agent's hand; the hand holds at most
one; the contents of a place leave the world only through `Seen`, which the agent gets by standing there with the place
open; a room's places leave it only through `Entered`; an action that is impossible changes nothing. Deterministic:
there is no chance after the task is drawn.
Called by: `environment` (the tools), `generate` and `houses` (verifying the expert), and random policies in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from springtide.suites.household.furnishings import BLADES, OBJECTS, PLACES
from springtide.suites.household.goals import Errands, kind_of, under_lit
from springtide.suites.household.tables import Receptacle, Thing

Call = tuple[str, dict[str, str]]

_STANDARD = ("go", "open", "shut", "take", "put", "heat", "cool", "clean", "use", "examine", "inventory")
_HOUSE = (*_STANDARD, "slice")
TOOLS: dict[str, tuple[str, ...]] = {
    "quick": ("go", "open", "take", "put", "heat", "cool", "clean"),
    "standard": _STANDARD,
    "hard": _HOUSE,
    "expert": _HOUSE,
    "master": _HOUSE,
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


@dataclass(frozen=True, slots=True)
class Entered:
    """What the agent sees of a room: its places, and the rooms its doors lead to."""

    room: str
    places: tuple[str, ...]
    doors: tuple[str, ...]


Result = Seen | Done | Entered


@dataclass(slots=True)
class Place:
    name: str
    kind: Receptacle
    is_open: bool
    room: str = ""  # "" where there is but one
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
            return under_lit(self.place, world) and world.held is not None and self.wants(world.held)
        state = _BECOMES[self.kind][0] if self.kind in _BECOMES else ""
        there = sum(
            item.place is not None
            and item.place.kind.name == self.place
            and self.wants(item)
            and (not state or state in item.states)
            for item in world.items.values()
        )
        return there >= (2 if self.kind == "two" else 1)


class World:
    """One household. `places`: names in listed order. `items`: (name, colour, place name), in the order they lie.

    `rooms`: (name, its places, the rooms its doors lead to); the agent starts in the first. None: all is one room.
    """

    def __init__(
        self,
        places: list[str],
        items: list[tuple[str, str, str]],
        rooms: list[tuple[str, list[str], list[str]]] | None = None,
    ) -> None:
        kinds = {name: PLACES[kind_of(name)] for name in places}
        self.places = {name: Place(name, kind, not kind.closed) for name, kind in kinds.items()}
        self.items: dict[str, Item] = {}
        self.rooms = {name: Entered(name, tuple(inside), tuple(doors)) for name, inside, doors in rooms or ()}
        for room in self.rooms.values():
            for name in room.places:
                self.places[name].room = room.room
        self.room: Entered | None = next(iter(self.rooms.values()), None)
        self.at: Place | None = None
        self.held: Item | None = None
        for name, colour, place in items:
            item = Item(name, OBJECTS[kind_of(name)], colour, self.places[place])
            self.items[name] = item
            self.places[place].holds.append(item)

    def act(self, tool: str, arguments: dict[str, str]) -> Result:
        """Do one action. Raises: Impossible (nothing changed), KeyError for a tool that does not exist."""
        return _ACTIONS[tool](self, **arguments)

    def go(self, place: str) -> Result:
        if self.room is not None:
            if place == self.room.room:
                raise Impossible(f"you are in {place}")
            if place in self.room.doors:
                self.room, self.at = self.rooms[place], None
                return self.room
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

    def slice(self, object: str) -> Result:
        if self.held is None or self.held.kind.name not in BLADES:
            raise Impossible("you hold no blade")
        item = self._visible(object)
        if "s" not in item.kind.can:
            raise Impossible(f"you cannot slice {object}")
        if "sliced" in item.states:
            raise Impossible(f"{object} is sliced")
        item.states.add("sliced")
        return Done(f"You slice {object} with {self.held.name}.")

    def use(self, object: str) -> Result:
        item = self._visible(object)
        if not item.kind.lamp:
            raise Impossible(f"{object} is not a lamp")
        if "lit" in item.states:
            raise Impossible(f"{object} is on")
        item.states.add("lit")
        return Done(f"You switch on {object}.")

    def examine(self, name: str) -> Result:
        if self.room is not None and name == self.room.room:
            return self.room
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
        reach = self.places if self.room is None else self.room.places + self.room.doors
        calls: list[Call] = [("go", {"place": name}) for name in reach if here is None or name != here.name]
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
            if held is not None and held.kind.name in BLADES:
                calls += [("slice", {"object": i.name}) for i in seen if "s" in i.kind.can and "sliced" not in i.states]
            calls += [("use", {"object": i.name}) for i in seen if i.kind.lamp and "lit" not in i.states]
            calls += [("examine", {"name": i.name}) for i in seen]
            calls.append(("examine", {"name": here.name}))
        if held is not None:
            calls.append(("examine", {"name": held.name}))
        if self.room is not None:
            calls.append(("examine", {"name": self.room.room}))
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
        if self.room is not None and name not in self.room.places:
            raise Impossible(f"there is no {name} in {self.room.room}")
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


_ACTIONS: dict[str, Callable[..., Result]] = {name: getattr(World, name) for name in _HOUSE}


def world_of(payload: dict[str, Any]) -> tuple[World, Goal | Errands]:
    """A fresh world and its goal, from a task's payload."""
    items = [tuple(i) for i in payload["items"]]
    if "errands" in payload:
        return World(payload["places"], items, payload["rooms"]), Errands.of(payload["errands"])
    return World(payload["places"], items), Goal(**payload["goal"])
