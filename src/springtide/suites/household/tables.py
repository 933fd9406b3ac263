"""What a household holds, as rows: receptacle types, object types, colours, and where things are usually kept.

Owns the only list of names of this suite. A deeper level is more rows here and nothing else. Rows marked `ood` appear
in the `ood` split alone, whether as goal, distractor or furniture, so that split shows names no training episode had.
Invariant: in every room that a kind of object is found in there may be furniture it is usually kept at.
Read by: `world`, `expert`, `generate`, `phrases`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A kind of place. `does` is what it can do to an object held in front of it: heat, cool or clean."""

    name: str
    rooms: str  # letters of ROOMS
    prep: str = "on"
    closed: bool = False  # starts closed: its contents show only after `open`
    does: str = ""
    most: int = 1  # how many of it one room may have
    ood: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """A kind of object. `can` holds the letters of what may be done to it: h(eat), c(ool), w(ash)."""

    name: str
    rooms: str  # letters of ROOMS
    homes: tuple[str, ...]
    can: str = ""
    lamp: bool = False  # is fixed where it stands and can be switched on
    ood: bool = False


ROOMS = {"k": "kitchen", "b": "bathroom", "d": "bedroom", "l": "living room"}

RECEPTACLES: dict[str, Receptacle] = {
    r.name: r
    for r in (
        Receptacle("table", "kl", most=2),
        Receptacle("counter", "kb", most=2),
        Receptacle("shelf", "kbdl", most=3),
        Receptacle("stove", "k"),
        Receptacle("cabinet", "kbl", "in", closed=True, most=4),
        Receptacle("drawer", "kbdl", "in", closed=True, most=4),
        Receptacle("sink", "kb", "in", does="clean"),
        Receptacle("microwave", "k", "in", closed=True, does="heat"),
        Receptacle("fridge", "k", "in", closed=True, does="cool"),
        Receptacle("bin", "kbdl", "in"),
        Receptacle("tub", "b", "in"),
        Receptacle("toilet", "b"),
        Receptacle("hamper", "bd", "in", closed=True),
        Receptacle("bed", "d", most=2),
        Receptacle("desk", "dl", most=2),
        Receptacle("dresser", "d", most=2),
        Receptacle("nightstand", "d", most=2),
        Receptacle("closet", "d", "in", closed=True),
        Receptacle("safe", "dl", "in", closed=True),
        Receptacle("sofa", "l", most=2),
        Receptacle("armchair", "dl", most=2),
        Receptacle("bookcase", "dl"),
        Receptacle("stand", "l"),
        Receptacle("box", "l", "in", closed=True, most=2),
        Receptacle("oven", "k", "in", closed=True, does="heat", ood=True),
        Receptacle("freezer", "k", "in", closed=True, does="cool", ood=True),
        Receptacle("basin", "kb", "in", does="clean", ood=True),
        Receptacle("cart", "kbl", most=2, ood=True),
        Receptacle("stool", "kbdl", most=2, ood=True),
        Receptacle("rack", "kbd", most=2, ood=True),
        Receptacle("chest", "dl", "in", closed=True, ood=True),
        Receptacle("bench", "kdl", ood=True),
    )
}

_COOK = ("counter", "stove", "cabinet", "rack", "bench")
_DINE = ("table", "counter", "cabinet", "sink", "shelf", "rack")
_CUTLERY = ("drawer", "table", "counter", "sink", "cart")
_FOOD = ("fridge", "table", "counter", "freezer", "cart")
_WASH = ("counter", "cabinet", "tub", "shelf", "stool")
_LINEN = ("hamper", "tub", "closet", "shelf", "rack")
_WRITE = ("desk", "drawer", "shelf", "nightstand", "stand", "bench")
_SMALL = ("drawer", "nightstand", "desk", "safe", "table", "stand", "chest")
_READ = ("bookcase", "sofa", "bed", "table", "nightstand", "desk", "stool")
_PLAY = ("closet", "box", "bed", "sofa", "armchair", "chest")
_DECOR = ("shelf", "table", "dresser", "stand", "bookcase", "cart")

THINGS: dict[str, Thing] = {
    t.name: t
    for t in (
        Thing("cup", "kl", _DINE, "hcw"),
        Thing("mug", "kl", _DINE, "hcw"),
        Thing("bowl", "kl", _DINE, "hcw"),
        Thing("plate", "k", _DINE, "hcw"),
        Thing("glass", "kl", _DINE, "cw"),
        Thing("pot", "k", _COOK, "hcw"),
        Thing("pan", "k", _COOK, "hcw"),
        Thing("kettle", "k", _COOK, "hw"),
        Thing("fork", "k", _CUTLERY, "w"),
        Thing("spoon", "k", _CUTLERY, "w"),
        Thing("knife", "k", _CUTLERY, "w"),
        Thing("ladle", "k", _CUTLERY, "w"),
        Thing("apple", "k", _FOOD, "hcw"),
        Thing("tomato", "k", _FOOD, "hcw"),
        Thing("potato", "k", _FOOD, "hcw"),
        Thing("egg", "k", _FOOD, "hcw"),
        Thing("melon", "k", _FOOD, "cw"),
        Thing("peach", "k", _FOOD, "hcw"),
        Thing("carrot", "k", _FOOD, "hcw"),
        Thing("bagel", "k", _FOOD, "hc"),
        Thing("sausage", "k", _FOOD, "hc"),
        Thing("burger", "k", _FOOD, "hc"),
        Thing("shaker", "k", ("counter", "cabinet", "table", "shelf")),
        Thing("bottle", "kb", ("counter", "cabinet", "fridge", "shelf"), "cw"),
        Thing("mirror", "b", _WASH, "w"),
        Thing("sponge", "kb", ("sink", *_WASH), "w"),
        Thing("cloth", "kb", ("sink", *_WASH), "w"),
        Thing("comb", "b", _WASH, "w"),
        Thing("razor", "b", _WASH, "w"),
        Thing("toothbrush", "b", ("counter", "cabinet", "sink"), "w"),
        Thing("spray", "b", ("counter", "cabinet", "toilet", "bin")),
        Thing("plunger", "b", ("toilet", "cabinet", "bin")),
        Thing("tissue", "bdl", ("toilet", "counter", "bin", "nightstand", "table")),
        Thing("candle", "bdl", ("counter", "shelf", "toilet", "table", "dresser")),
        Thing("towel", "bd", _LINEN),
        Thing("shirt", "d", ("hamper", "closet", "bed", "dresser")),
        Thing("blanket", "dl", ("bed", "sofa", "closet", "armchair")),
        Thing("pillow", "dl", ("bed", "sofa", "armchair", "closet")),
        Thing("pen", "dl", _WRITE),
        Thing("pencil", "dl", _WRITE),
        Thing("laptop", "dl", ("desk", "bed", "sofa", "table")),
        Thing("phone", "dl", _SMALL),
        Thing("key", "dl", _SMALL),
        Thing("watch", "dl", _SMALL),
        Thing("card", "dl", _SMALL),
        Thing("book", "dl", _READ),
        Thing("letter", "dl", _READ),
        Thing("magazine", "dl", _READ),
        Thing("remote", "l", ("sofa", "stand", "table", "armchair")),
        Thing("ball", "dl", _PLAY),
        Thing("bat", "dl", _PLAY),
        Thing("racket", "dl", _PLAY),
        Thing("doll", "dl", _PLAY),
        Thing("clock", "dl", ("nightstand", "dresser", "shelf", "desk")),
        Thing("vase", "dl", _DECOR),
        Thing("statue", "dl", _DECOR),
        Thing("picture", "dl", _DECOR),
        Thing("desklamp", "dl", ("desk", "nightstand", "dresser"), lamp=True),
        Thing("lantern", "dl", ("table", "stand", "bookcase", "shelf"), lamp=True),
        Thing("pear", "k", _FOOD, "hcw", ood=True),
        Thing("onion", "k", _FOOD, "hcw", ood=True),
        Thing("jug", "kl", _DINE, "hcw", ood=True),
        Thing("tray", "k", _DINE, "hcw", ood=True),
        Thing("whisk", "k", _CUTLERY, "w", ood=True),
        Thing("hairbrush", "b", _WASH, "w", ood=True),
        Thing("scarf", "d", ("hamper", "closet", "bed", "dresser", "stool"), ood=True),
        Thing("camera", "dl", _SMALL, ood=True),
        Thing("wallet", "dl", _SMALL, ood=True),
        Thing("diary", "dl", _READ, ood=True),
        Thing("puzzle", "dl", _PLAY, ood=True),
        Thing("trophy", "dl", _DECOR, ood=True),
        Thing("torch", "dl", ("desk", "shelf", "table", "dresser"), lamp=True, ood=True),
    )
}

# At `quick` a task names an object by its colour alone: what to take has to be read from what is seen.
COLOURS = ("red", "blue", "green", "white", "black", "pink", "brown", "grey")
OOD_COLOURS = ("gold", "purple")


def things_of(room: str, ood: bool) -> tuple[Thing, ...]:
    """The kinds of movable objects a room may hold; with `ood`, also those no training task has."""
    return tuple(t for t in THINGS.values() if room in t.rooms and not t.lamp and (ood or not t.ood))


def receptacles_of(room: str, ood: bool) -> tuple[Receptacle, ...]:
    """The kinds of places a room may have; with `ood`, also those no training task has."""
    return tuple(r for r in RECEPTACLES.values() if room in r.rooms and (ood or not r.ood))
