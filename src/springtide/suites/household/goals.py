"""What a house is to be brought to: errands that have to hold all at once.

Owns the meaning of an errand. Invariants: `holds` reads the world and changes nothing; all that an errand wants lies at
one and the same place; what is in the hand lies nowhere. Called by: `world.world_of`, `houses`, `explorer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.suites.household.world import Item, Place, World


def kind_of(name: str) -> str:
    """The kind of a named place, object or room: "drawer" for "drawer 2", "living room" for "living room 1"."""
    head, _, number = name.rpartition(" ")
    return head if number.isdigit() else name


def under_lit(lamp: str, world: World) -> bool:
    """Whether the agent stands where a lamp of this kind is lit."""
    return world.at is not None and any(i.kind.name == lamp and "lit" in i.states for i in world.at.holds)


@dataclass(frozen=True, slots=True)
class Want:
    """`count` objects of a kind in all of `states`; `exact`: so many and no more, with none of the kind in the hand."""

    thing: str
    states: tuple[str, ...] = ()
    count: int = 1
    exact: bool = False

    def fits(self, item: Item) -> bool:
        return item.kind.name == self.thing and item.states.issuperset(self.states)

    def holds(self, place: Place, held: Item | None) -> bool:
        found = sum(self.fits(item) for item in place.holds)
        if self.exact:
            return found == self.count and (held is None or not self.fits(held))
        return found >= self.count


@dataclass(frozen=True, slots=True)
class Errand:
    """One part of a goal. `place`: a kind of receptacle, a place's name, or a kind of lamp (`light`, `look`).

    kind: its family, which chose its words; only `light` (a lamp of that kind is lit) and `look` (the object is in the
    hand where one is lit) have a meaning of their own. room: a kind of room, "" for any. shut: closed at the end.
    """

    kind: str
    place: str
    room: str = ""
    wants: tuple[Want, ...] = ()
    shut: bool = False

    def is_named(self, place: str, room: str) -> bool:
        """Whether a place of this name, in a room of this name, is one that the errand names."""
        return self.place in (place, kind_of(place)) and self.room in ("", kind_of(room))

    def holds(self, world: World) -> bool:
        if self.kind == "light":
            return any(
                item.kind.name == self.place and "lit" in item.states
                for place in world.places.values()
                if self.room in ("", kind_of(place.room))
                for item in place.holds
            )
        if self.kind == "look":
            return under_lit(self.place, world) and world.held is not None and self.wants[0].fits(world.held)
        return any(
            self.is_named(place.name, place.room)
            and not (self.shut and place.is_open)
            and all(want.holds(place, world.held) for want in self.wants)
            for place in world.places.values()
        )


@dataclass(frozen=True, slots=True)
class Errands:
    """A goal of several parts, all of which must hold at the same time."""

    parts: tuple[Errand, ...]

    def holds(self, world: World) -> bool:
        return all(part.holds(world) for part in self.parts)

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Errands:
        """From a task's payload."""
        return cls(
            tuple(
                Errand(
                    row["kind"],
                    row["place"],
                    row["room"],
                    tuple(Want(thing, tuple(states), count, exact) for thing, states, count, exact in row["wants"]),
                    row["shut"],
                )
                for row in rows
            )
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain data that `of` reads."""
        return [
            {
                "kind": part.kind,
                "place": part.place,
                "room": part.room,
                "wants": [[w.thing, list(w.states), w.count, w.exact] for w in part.wants],
                "shut": part.shut,
            }
            for part in self.parts
        ]
