"""The expert: a searcher that knows no more than the prompt and the replies say. Its calls are the suite's gold.

`explorer` has the one for houses of several rooms; `play` lets either act. The rule here, all of it: go through the
listed places in order until the wanted object is seen, opening what is closed; pass over places of the kind the task
names as destination (the object never starts there). At `standard` the places where such an object is usually kept
come first (`tables.THINGS[...].homes`, common knowledge about kinds, not about this room), then the rest, each in
listed order. What was seen on the way is remembered. Then: treat it at the first listed appliance that does so, and
bring it to the first listed destination.
Invariant: a generator that gets reply texts and nothing else, so it cannot look into the world.
Called by: `generate` (every task is solved once when it is drawn), `environment.gold`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from springtide.suites.household.explorer import explore
from springtide.suites.household.goals import Errands, kind_of
from springtide.suites.household.tables import RECEPTACLES, THINGS
from springtide.suites.household.text import refusal_text, reply_text, seen_in
from springtide.suites.household.world import Call, Goal, Impossible, World

Plan = Generator[Call, str, None]


class _Searcher:
    """What the expert remembers while it works."""

    def __init__(self, level: str, goal: Goal, places: list[str]) -> None:
        self.level, self.goal, self.places = level, goal, places
        self.at = ""
        self.seen: dict[str, list[str]] = {}  # place -> labels that lie there, as last known

    def go(self, place: str) -> Plan:
        """Stand at `place`, opened, its contents known."""
        if place == self.at:
            return
        labels = seen_in(self.level, (yield "go", {"place": place}))
        self.at = place
        if labels is None:
            labels = seen_in(self.level, (yield "open", {"place": place}))
        self.seen[place] = list(labels or ())

    def find(self, wanted: Callable[[str], bool], usual: tuple[str, ...], avoid: str) -> Generator[Call, str, str]:
        """Stand where a wanted label is seen, and return it: a remembered one first, else by search."""
        order = [place for place in self.places if kind_of(place) != avoid]
        if self.level != "quick":
            order.sort(key=lambda place: kind_of(place) not in usual)  # stable: listed order within both parts
        known = [place for place in order if any(wanted(label) for label in self.seen.get(place, ()))]
        for place in known or [place for place in order if place not in self.seen]:
            yield from self.go(place)
            for label in self.seen[place]:
                if wanted(label):
                    return label
        raise AssertionError("the wanted object is at no place that was searched")

    def fetch(self) -> Generator[Call, str, str]:
        """Take the object the goal wants; returns its name."""
        goal = self.goal
        if goal.colour:
            label = yield from self.find(lambda label: label.startswith(f"{goal.colour} "), (), goal.place)
            name = label.removeprefix(f"{goal.colour} ")
        else:
            homes = THINGS[goal.thing].homes
            label = name = yield from self.find(lambda label: kind_of(label) == goal.thing, homes, goal.place)
        yield "take", {"object": name}
        self.seen[self.at].remove(label)
        return name

    def deliver(self) -> Plan:
        """Bring what is held to the first listed place of the goal's kind."""
        target = next(place for place in self.places if kind_of(place) == self.goal.place)
        if target == self.at or target in self.seen:
            # Opened earlier, so it needs no second opening.
            if target != self.at:
                yield "go", {"place": target}
                self.at = target
        else:
            yield from self.go(target)
        yield "put", {"place": target}


def expert(level: str, goal: Goal, places: list[str]) -> Plan:
    """Yields calls, is sent the text of each reply, and returns when it believes that the task is done."""
    me = _Searcher(level, goal, places)
    if goal.kind == "two":
        for _ in range(2):
            yield from me.fetch()
            yield from me.deliver()
        return
    name = yield from me.fetch()
    if goal.kind == "look":
        homes = THINGS[goal.place].homes
        lamp = yield from me.find(lambda label: kind_of(label) == goal.place, homes, "")
        yield "use", {"object": lamp}
        return
    if goal.kind in ("heat", "cool", "clean"):
        appliance = next(place for place in places if RECEPTACLES[kind_of(place)].does == goal.kind)
        if appliance != me.at:
            # It works closed, so it is not opened; what lies in it is not looked at.
            yield "go", {"place": appliance}
            me.at = appliance
        yield goal.kind, {"object": name}
    yield from me.deliver()


def play(level: str, world: World, goal: Goal | Errands) -> tuple[list[Call], bool]:
    """Let the expert act in `world`. Returns its calls and whether the goal held after the last and not before."""
    calls: list[Call] = []
    if isinstance(goal, Errands):
        assert world.room is not None  # what the prompt shows
        plan = explore(goal, world.room)
    else:
        plan = expert(level, goal, list(world.places))
    try:
        call = next(plan)
        while True:
            calls.append(call)
            try:
                text = reply_text(level, world.act(*call))
            except Impossible as refusal:
                text = refusal_text(level, str(refusal))
            if goal.holds(world):
                return calls, True
            call = plan.send(text)
    except StopIteration:
        return calls, False
