"""What the agent reads: replies in words, and the prompt. The expert reads the same words back (`seen_in`).

Owns the two styles: `quick` is terse to the point of single words, the other levels speak in sentences. Invariant:
`seen_in(level, reply_text(level, result))` gives back exactly the names a `Seen` shows, and `entered_in` the room that
an `Entered` shows, so whatever the expert knows stands in the text. Called by: `environment`, the experts, `generate`.
"""

from __future__ import annotations

from springtide.suites.household.world import Entered, Result, Seen

_NOTHING = "nothing"


def prompt_text(level: str, room: str, places: list[str], instruction: str) -> str:
    """The first message: what to do and where one can go, in listed order."""
    if level == "quick":
        return f"{instruction} Places: {', '.join(places)}"
    return (
        f"You are in a {room}. Places: {', '.join(places)}.\n"
        f"Your task: {instruction}\n"
        "You see what is at a place only when you go there; closed places must be opened. You can hold one object. "
        "To heat, cool or clean an object, hold it at a place that can do that. The task ends when it is done."
    )


def house_prompt(start: Entered, instruction: str) -> str:
    """The first message in a house of several rooms."""
    return (
        f"{_room_text(start)}\n"
        f"Your task: {instruction}\n"
        "This is a house of several rooms. You reach only the places of the room you are in; to go through a door, "
        "go to the room it leads to. You see what is at a place only when you go there; closed places must be "
        "opened. You can hold one object, and what you hold lies nowhere. To heat, cool or clean an object, hold it "
        "at a place that can do that; to slice one, go where it lies, holding a blade. Lamps stay where they are. "
        "The task ends when all that it asks for holds at the same time."
    )


def _room_text(room: Entered) -> str:
    doors = f"Doors lead to: {', '.join(room.doors)}."
    return f"You are in {room.room}. Places: {', '.join(room.places)}. {doors}"


def entered_in(text: str) -> Entered:
    """The room that a reply to entering it, or the first line of a prompt, shows."""
    room, places, doors = text.split(". ")
    return Entered(
        room.removeprefix("You are in "),
        tuple(places.removeprefix("Places: ").split(", ")),
        tuple(doors.removeprefix("Doors lead to: ").removesuffix(".").split(", ")),
    )


def reply_text(level: str, result: Result) -> str:
    """A result in words."""
    if isinstance(result, Entered):
        return _room_text(result)
    if not isinstance(result, Seen):
        return "ok" if level == "quick" else result.text
    if level == "quick":
        return "closed" if result.names is None else ", ".join(result.names) or "empty"
    if result.names is None:
        return f"You are at {result.place}. It is closed."
    lead = f"You open {result.place}." if result.opened else f"You are at {result.place}."
    return f"{lead} {result.prep.capitalize()} it you see: {', '.join(result.names) or _NOTHING}."


def refusal_text(level: str, reason: str) -> str:
    """Why an action did nothing."""
    return f"no: {reason}" if level == "quick" else f"Nothing happens: {reason}."


def seen_in(level: str, text: str) -> tuple[str, ...] | None:
    """The object labels a reply to go or open shows; None when it says that the place is closed."""
    if level == "quick":
        if text == "closed":
            return None
        return () if text == "empty" else tuple(text.split(", "))
    if text.endswith("It is closed."):
        return None
    names = text.rpartition(" you see: ")[2].removesuffix(".")
    return () if names == _NOTHING else tuple(names.split(", "))
