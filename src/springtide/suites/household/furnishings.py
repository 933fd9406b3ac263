"""What the houses of `hard`, `expert` and `master` hold beyond `tables`: more rows, and what can be sliced.

Owns the lists of names of those levels: `PLACES` and `OBJECTS` are the rows of `tables` and the ones here. `tables` is
left as it is, for `quick` and `standard` are drawn from it. Rows marked `ood` appear in the `ood` split alone.
Invariant: what can be done to a row of `tables` (heat, cool, wash) is the same in both. Read by: `world`, `houses`,
`explorer`.
"""

from __future__ import annotations

from dataclasses import replace

from springtide.suites.household.tables import RECEPTACLES, THINGS, Receptacle, Thing

_MORE_PLACES = (
    Receptacle("island", "k"),
    Receptacle("pantry", "k", "in", closed=True),
    Receptacle("breadbox", "k", "in", closed=True),
    Receptacle("dishwasher", "k", "in", closed=True, does="clean"),
    Receptacle("toaster", "k", "in", does="heat"),
    Receptacle("cooler", "k", "in", closed=True, does="cool"),
    Receptacle("locker", "b", "in", closed=True, most=2),
    Receptacle("vanity", "bd"),
    Receptacle("bucket", "b", "in"),
    Receptacle("wardrobe", "d", "in", closed=True),
    Receptacle("trunk", "d", "in", closed=True),
    Receptacle("windowsill", "kbdl", most=2),
    Receptacle("sideboard", "l", "in", closed=True),
    Receptacle("mantel", "l"),
    Receptacle("ottoman", "l"),
    Receptacle("piano", "l"),
    Receptacle("basket", "bl", "in", most=2),
    Receptacle("hutch", "kl", "in", closed=True, ood=True),
    Receptacle("cubby", "bd", "in", ood=True),
    Receptacle("trolley", "kl", ood=True),
)
# Things are kept at a new kind of place as at the old one that it is like.
_LIKE = {
    "island": "counter",
    "pantry": "cabinet",
    "breadbox": "fridge",
    "dishwasher": "sink",
    "cooler": "fridge",
    "locker": "cabinet",
    "vanity": "dresser",
    "bucket": "tub",
    "wardrobe": "closet",
    "trunk": "closet",
    "windowsill": "shelf",
    "sideboard": "cabinet",
    "mantel": "shelf",
    "ottoman": "sofa",
    "piano": "stand",
    "basket": "hamper",
    "hutch": "cabinet",
    "cubby": "closet",
    "trolley": "table",
}
_FOOD, _COOK, _CUTLERY = THINGS["apple"].homes, THINGS["pot"].homes, THINGS["fork"].homes
_DINE, _WASH, _PLAY, _READ = THINGS["cup"].homes, THINGS["comb"].homes, THINGS["ball"].homes, THINGS["book"].homes
_WEAR, _SMALL, _DECOR = THINGS["shirt"].homes, THINGS["key"].homes, THINGS["vase"].homes
_LAMP = ("desk", "nightstand", "dresser", "table", "stand", "shelf")

_MORE_OBJECTS = (
    Thing("bread", "k", _FOOD, "hcs"),
    Thing("cheese", "k", _FOOD, "hcs"),
    Thing("lettuce", "k", _FOOD, "cws"),
    Thing("cucumber", "k", _FOOD, "cws"),
    Thing("lemon", "k", _FOOD, "hcws"),
    Thing("orange", "k", _FOOD, "hcws"),
    Thing("banana", "k", _FOOD, "hcs"),
    Thing("cake", "k", _FOOD, "hcs"),
    Thing("pie", "k", _FOOD, "hcs"),
    Thing("ham", "k", _FOOD, "hcs"),
    Thing("teapot", "k", _COOK, "hcw"),
    Thing("wok", "k", _COOK, "hcw"),
    Thing("grater", "k", _CUTLERY, "w"),
    Thing("tongs", "k", _CUTLERY, "w"),
    Thing("spatula", "k", _CUTLERY, "w"),
    Thing("jar", "k", _DINE, "hcw"),
    Thing("thermos", "kl", _DINE, "hcw"),
    Thing("soap", "b", ("sink", *_WASH)),
    Thing("shampoo", "b", _WASH, "w"),
    Thing("bathmat", "b", ("tub", "hamper", "shelf")),
    Thing("sock", "d", _WEAR),
    Thing("hat", "d", _WEAR),
    Thing("belt", "d", _WEAR),
    Thing("glove", "dl", _WEAR),
    Thing("newspaper", "l", _READ),
    Thing("notebook", "dl", _READ),
    Thing("headset", "dl", _SMALL),
    Thing("coin", "dl", _SMALL),
    Thing("kite", "dl", _PLAY),
    Thing("drum", "dl", _PLAY),
    Thing("globe", "dl", _DECOR),
    Thing("floorlamp", "dl", _LAMP, lamp=True),
    Thing("nightlight", "bd", (*_LAMP, "counter", "vanity"), lamp=True),
    Thing("worklight", "k", ("counter", "island", "table", "shelf"), lamp=True),
    Thing("mango", "k", _FOOD, "hcws", ood=True),
    Thing("radish", "k", _FOOD, "cws", ood=True),
    Thing("waffle", "k", _FOOD, "hcs", ood=True),
    Thing("cleaver", "k", _CUTLERY, "w", ood=True),
    Thing("goblet", "kl", _DINE, "cw", ood=True),
    Thing("loofah", "b", _WASH, "w", ood=True),
    Thing("robe", "bd", ("hamper", "closet", "bed", "tub"), ood=True),
    Thing("chandelier", "dl", _LAMP, lamp=True, ood=True),
)
_SLICED_TOO = ("apple", "tomato", "potato", "melon", "peach", "carrot", "bagel", "sausage", "pear", "onion")
BLADES = ("knife", "cleaver")

PLACES: dict[str, Receptacle] = RECEPTACLES | {r.name: r for r in _MORE_PLACES}
OBJECTS: dict[str, Thing] = {
    name: replace(
        row,
        homes=row.homes + tuple(new for new, old in _LIKE.items() if old in row.homes and new not in row.homes),
        can=row.can + ("s" if name in _SLICED_TOO else ""),
    )
    for name, row in (THINGS | {t.name: t for t in _MORE_OBJECTS}).items()
}
