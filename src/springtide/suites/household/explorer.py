"""The expert of the levels with several rooms: a searcher that knows no more than the prompt and the replies say.

The rule, all of it: do the errands in order, the one that ends in an examination last and shutting before it. What is
wanted is looked for at the nearest known place where its kind is usually kept (common knowledge about kinds, not about
this house), then behind doors to rooms of a kind that may have it, then at the other places, then behind the other
doors. What was seen on the way is remembered, and that place is used next time.
Invariant: a generator that gets the room it starts in and reply texts and nothing else, so it cannot look into the
world. Called by: `expert.play`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from springtide.suites.household.furnishings import BLADES, OBJECTS, PLACES
from springtide.suites.household.goals import Errand, Errands, Want, kind_of
from springtide.suites.household.tables import ROOMS
from springtide.suites.household.text import entered_in, seen_in
from springtide.suites.household.world import Call, Entered

Plan = Generator[Call, str, None]
Find = Generator[Call, str, str]
_LEVEL = "hard"  # all these levels speak the same words
_VERBS = {"clean": "clean", "hot": "heat", "cold": "cool"}  # in this order: washing undoes nothing


def explore(goal: Errands, start: Entered) -> Plan:
    """Yields calls, is sent the text of each reply, and returns when it believes that the task is done."""
    me = _Explorer(start)
    for part in sorted(goal.parts, key=lambda part: part.kind == "look"):
        if part.kind == "light":
            yield from me.light(part.place, part.room)
        elif part.kind == "look":
            yield from me.fetch(part.wants[0])
            yield from me.light(part.place, "")
        elif part.kind == "exact":
            yield from me.count_out(part)
        else:
            yield from me.bring(part)
    for place in me.to_shut:
        yield from me.go(place)
        yield "shut", {"place": place}


class _Explorer:
    """What the expert remembers while it works."""

    def __init__(self, start: Entered) -> None:
        self.room, self.at = start.room, ""
        self.rooms = {start.room: start}  # entered so far
        self.where = dict.fromkeys(start.places, start.room)  # known place -> its room
        self.seen: dict[str, list[str]] = {}  # place -> labels that lie there, as last known
        self.open: set[str] = set()  # closed kinds of places that were opened
        self.done: set[str] = set()  # labels that lie where they were asked to
        self.lit: set[str] = set()
        self.to_shut: list[str] = []

    # --- errands -----------------------------------------------------------------------------------------------------

    def bring(self, part: Errand) -> Plan:
        """Everything that is wanted, to one place. An object that could not be put is never carried about in vain."""
        target = ""
        for want in part.wants:
            for _ in range(want.count):
                label = yield from self.fetch(want)
                target = target or (yield from self.find_place(part.is_named))
                yield from self.put(label, target)
                self.done.add(label)
        if part.shut:
            self.to_shut.append(target)

    def count_out(self, part: Errand) -> Plan:
        """Take away from, or add to, a place until it holds what is wanted."""
        (want,) = part.wants
        target = yield from self.find_place(part.is_named)
        yield from self.visit(target)
        there = [label for label in self.seen[target] if kind_of(label) == want.thing]
        self.done.update(there)
        for label in there[want.count :]:
            yield from self.go(target)
            yield from self.take(label)
            beside = yield from self.find_place(lambda name, _: name != target and not PLACES[kind_of(name)].closed)
            yield from self.put(label, beside)
        for _ in range(want.count - len(there)):
            label = yield from self.fetch(want)
            yield from self.put(label, target)
            self.done.add(label)

    def light(self, lamp: str, room: str) -> Plan:
        """Switch on a lamp of a kind, in a kind of room."""
        label = yield from self.find(lambda label: kind_of(label) == lamp, lamp, room)
        if label not in self.lit:
            yield "use", {"object": label}
            self.lit.add(label)

    def fetch(self, want: Want) -> Find:
        """Hold an object as wanted; its label."""

        def fits(label: str) -> bool:
            return kind_of(label) == want.thing and label not in self.done

        if "sliced" in want.states:
            blade = yield from self.find(lambda label: kind_of(label) in BLADES, BLADES[0])
            yield from self.take(blade)
            label = yield from self.find(fits, want.thing)
            yield "slice", {"object": label}
            yield from self.put(blade, self.at)
        else:
            label = yield from self.find(fits, want.thing)
        yield from self.take(label)
        for state, verb in _VERBS.items():
            if state in want.states:
                appliance = yield from self.find_place(_able(verb))
                yield from self.go(appliance)  # it works closed, so it is not opened
                yield verb, {"object": label}
        return label

    # --- searching ---------------------------------------------------------------------------------------------------

    def find(self, wanted: Callable[[str], bool], thing: str, room: str = "") -> Find:
        """Stand where a wanted label is seen, and return it: a remembered one first, else by search."""
        kind = OBJECTS[thing]
        likely = {room} if room else {ROOMS[letter] for letter in kind.rooms}

        def allowed(place: str) -> bool:
            return room in ("", kind_of(self.where[place]))

        while True:
            for place in self.by_distance(p for p in self.seen if allowed(p)):
                for label in self.seen[place]:
                    if wanted(label):
                        yield from self.visit(place)
                        return label
            ways = self.ways()
            options: list[tuple[int, int, str]] = []
            for place, where in self.where.items():
                if place not in self.seen and allowed(place):
                    suits = kind_of(where) in likely
                    rank = 0 if suits and kind_of(place) in kind.homes else 2 if suits else 4
                    options.append((rank, len(ways[where]), place))
            options += [(1 if kind_of(door) in likely else 3, len(ways[door]), door) for door in self.unentered()]
            if not options:
                raise AssertionError(f"no {thing} at any place that was searched")
            _, _, name = min(options, key=lambda option: option[:2])
            yield from (self.visit(name) if name in self.where else self.enter(name))

    def find_place(self, wanted: Callable[[str, str], bool]) -> Find:
        """The nearest known place for which `wanted(name, room)` holds; more rooms are entered until there is one."""
        while True:
            for place in self.by_distance(p for p in self.where if wanted(p, self.where[p])):
                return place
            doors = [door for door in self.unentered() if any(wanted(k, door) for k in _kinds_in(door))]
            doors = doors or self.unentered()
            if not doors:
                raise AssertionError("no room has the place that is wanted")
            ways = self.ways()
            yield from self.enter(min(doors, key=lambda door: len(ways[door])))

    def unentered(self) -> list[str]:
        return list(dict.fromkeys(d for room in self.rooms.values() for d in room.doors if d not in self.rooms))

    def by_distance(self, places: Iterable[str]) -> list[str]:
        """Nearest first; among equals those known longest."""
        ways = self.ways()
        return sorted(places, key=lambda place: (place != self.at, len(ways[self.where[place]])))

    def ways(self) -> dict[str, list[str]]:
        """For every room that is known, the rooms to go through to be in it, itself the last."""
        ways: dict[str, list[str]] = {self.room: []}
        queue = [self.room]
        for here in queue:
            for door in self.rooms[here].doors if here in self.rooms else ():
                if door not in ways:
                    ways[door] = [*ways[here], door]
                    queue.append(door)
        return ways

    # --- moving ------------------------------------------------------------------------------------------------------

    def enter(self, room: str) -> Plan:
        for step in self.ways()[room]:
            found = entered_in((yield "go", {"place": step}))
            self.room, self.at, self.rooms[step] = step, "", found
            for place in found.places:
                self.where.setdefault(place, step)

    def go(self, place: str) -> Plan:
        """Stand at a place, whose contents are known if it is open."""
        if place == self.at:
            return
        yield from self.enter(self.where[place])
        labels = seen_in(_LEVEL, (yield "go", {"place": place}))
        self.at = place
        if labels is not None:
            self.seen[place] = list(labels)

    def visit(self, place: str) -> Plan:
        """Stand at a place, opened."""
        yield from self.go(place)
        if PLACES[kind_of(place)].closed and place not in self.open:
            self.seen[place] = list(seen_in(_LEVEL, (yield "open", {"place": place})) or ())
            self.open.add(place)

    def take(self, label: str) -> Plan:
        yield "take", {"object": label}
        self.seen[self.at].remove(label)

    def put(self, label: str, place: str) -> Plan:
        yield from self.visit(place)
        yield "put", {"place": place}
        self.seen[place].append(label)


def _able(verb: str) -> Callable[[str, str], bool]:
    """Whether a place can do what `verb` says to what is held before it."""
    return lambda name, _: PLACES[kind_of(name)].does == verb


def _kinds_in(room: str) -> list[str]:
    """The kinds of places that a room of this kind may have."""
    return [kind for kind, row in PLACES.items() if any(ROOMS[letter] == kind_of(room) for letter in row.rooms)]
