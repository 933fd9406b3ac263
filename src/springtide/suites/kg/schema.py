"""The graph's schema as a policy meets it: which relations and attributes an entity of a type may have.

Owns the names. A relation is a predicate read forwards or backwards (`country` of a city and `city` of a country are
the same triples), so the data holds every fact once. Names are unique within a type. `VIEWS` says what a level shows:
`quick` a part whose lists stay short, the others everything; `hard` and `expert` also show `COUNTS`, numbers that are
counted, not stored. Used by the graph, the question writers and the script that builds the data; it imports nothing
heavy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """A step from an entity of `source` to entities of `target` along `predicate` (backwards where `inverse`).

    `single` says that an entity has at most one such neighbour. `one`, `many` and `phrase` are how a question says
    it: "the {one} {phrase}", with the entity in the place of {x}.
    """

    source: str
    name: str
    predicate: str
    target: str
    inverse: bool
    single: bool
    one: str
    many: str
    phrase: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number an entity of `source` carries, with the words for its two ends."""

    source: str
    name: str
    high: str
    low: str


def plural(noun: str) -> str:
    """The plural of a noun of this schema."""
    if noun.endswith("series"):
        return noun
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


RELATIONS: dict[str, dict[str, Relation]] = {}
ATTRIBUTES: dict[str, dict[str, Attribute]] = {}


def _relation(
    source: str,
    name: str,
    target: str,
    *,
    of: str = "",
    single: bool = False,
    words: str = "",
    phrase: str = "of {x}",
) -> None:
    """Declare a relation; `of` names the forward declaration ("type.name") whose triples it reads backwards."""
    one, _, many = (words or name).partition("/")
    many = many or plural(one)
    inverse = bool(of)
    RELATIONS.setdefault(source, {})[name] = Relation(
        source, name, of or f"{source}.{name}", target, inverse, single, one, many, phrase
    )


def _attributes(source: str, **ends: tuple[str, str]) -> None:
    for key, (high, low) in ends.items():
        name = key.replace("_", " ")
        ATTRIBUTES.setdefault(source, {})[name] = Attribute(source, name, high, low)


# Geography: GeoNames, airportsdata, ISO codes.
_relation("airport", "city", "city", single=True, phrase="served by {x}")
_relation("airport", "country", "country", single=True)
_relation("airport", "zone", "zone", single=True, words="time zone")
_relation("airport", "region", "region", single=True)
_relation("city", "country", "country", single=True)
_relation("city", "zone", "zone", single=True, words="time zone")
_relation("city", "region", "region", single=True)
_relation("city", "airport", "airport", of="airport.city", phrase="serving {x}")
_relation("city", "seat of", "country", of="country.capital", single=True, words="country", phrase="governed from {x}")
_relation("city", "customer", "customer", of="customer.city", phrase="living in {x}")
_relation("region", "country", "country", single=True)
_relation("region", "zone", "zone", words="time zone")
_relation("region", "city", "city", of="city.region", phrase="in {x}")
_relation("region", "airport", "airport", of="airport.region", phrase="in {x}")
_relation("zone", "country", "country", words="country", phrase="with places in {x}")
_relation("zone", "region", "region", of="region.zone", phrase="with places in {x}")
_relation("zone", "city", "city", of="city.zone", phrase="keeping the time of {x}")
_relation("zone", "airport", "airport", of="airport.zone", phrase="keeping the time of {x}")
_relation("country", "capital", "city", single=True)
_relation("country", "currency", "currency", single=True)
_relation("country", "continent", "continent", single=True)
_relation("country", "language", "language", phrase="spoken in {x}")
_relation("country", "neighbour", "country", words="neighbour", phrase="of {x}")
_relation("country", "calling code", "calling code", single=True)
_relation("country", "domain", "domain", single=True, words="internet domain")
_relation("country", "city", "city", of="city.country", phrase="in {x}")
_relation("country", "airport", "airport", of="airport.country", phrase="in {x}")
_relation("country", "region", "region", of="region.country", phrase="in {x}")
_relation("country", "customer", "customer", of="customer.country", phrase="living in {x}")
_relation("country", "product", "element", of="element.producer", words="element", phrase="mined mainly in {x}")
_relation("country", "discovery", "element", of="element.found in", words="element", phrase="discovered in {x}")
_relation("currency", "country", "country", of="country.currency", phrase="paying with {x}")
_relation("continent", "country", "country", of="country.continent", phrase="on the continent {x}")
_relation("language", "country", "country", of="country.language", phrase="whose people speak {x}")
_relation("calling code", "country", "country", of="country.calling code", phrase="reached by dialling {x}")
_relation("domain", "country", "country", of="country.domain", phrase="with addresses in {x}")

# Music: the Chinook store.
_relation("track", "album", "album", single=True)
_relation("track", "genre", "genre", single=True)
_relation("track", "composer", "composer")
_relation("track", "format", "format", single=True, words="file format")
_relation("track", "playlist", "playlist", phrase="with {x} on them")
_relation("track", "buyer", "customer", of="customer.purchase")
_relation("album", "artist", "artist", single=True)
_relation("album", "genre", "genre")
_relation("album", "format", "format", words="file format")
_relation("album", "track", "track", of="track.album", phrase="on {x}")
_relation("artist", "genre", "genre", words="genre", phrase="of {x}")
_relation("artist", "composer", "composer", phrase="who wrote for {x}")
_relation("artist", "format", "format", words="file format", phrase="of {x}")
_relation("artist", "album", "album", of="album.artist", phrase="by {x}")
_relation("composer", "genre", "genre", phrase="of the work of {x}")
_relation("composer", "artist", "artist", of="artist.composer", phrase="who recorded {x}")
_relation("composer", "album", "album", phrase="with work by {x}")
_relation("composer", "track", "track", of="track.composer", phrase="written by {x}")
_relation("genre", "track", "track", of="track.genre", phrase="classed as {x}")
_relation("genre", "album", "album", of="album.genre", phrase="classed as {x}")
_relation("genre", "artist", "artist", of="artist.genre", phrase="classed as {x}")
_relation("format", "track", "track", of="track.format", phrase="sold as {x}")
_relation("playlist", "track", "track", of="track.playlist", phrase="on {x}")
_relation("customer", "country", "country", single=True, words="home country")
_relation("customer", "city", "city", single=True, words="home town")
_relation("customer", "agent", "employee", single=True, words="support agent")
_relation("customer", "purchase", "track", words="track", phrase="bought by {x}")
_relation("employee", "manager", "employee", single=True, phrase="of {x}")
_relation("employee", "report", "employee", of="employee.manager", words="direct report")
_relation("employee", "client", "customer", of="customer.agent", words="customer", phrase="looked after by {x}")

# Chemistry: mendeleev.
_relation("element", "group", "group", single=True)
_relation("element", "period", "period", single=True)
_relation("element", "block", "block", single=True)
_relation("element", "series", "series", single=True, words="series")
_relation("element", "lattice", "lattice", single=True, words="crystal lattice")
_relation("element", "affinity", "affinity", single=True, words="geochemical affinity")
_relation("element", "discoverer", "discoverer")
_relation("element", "found in", "country", words="country", phrase="that saw the discovery of {x}")
_relation("element", "producer", "country", words="leading producer")
for _kind in ("group", "period", "block", "series", "lattice", "affinity"):
    _relation(_kind, "element", "element", of=f"element.{_kind}", phrase="classed under {x}")
_relation("discoverer", "element", "element", of="element.discoverer", phrase="discovered by {x}")

# Words: the nouns of WordNet.
_relation("word", "kind", "word", words="broader term", phrase="of {x}")
_relation("word", "example", "word", of="word.kind", words="kind", phrase="of {x}")
_relation("word", "part", "word", words="part", phrase="of {x}")
_relation("word", "whole", "word", of="word.part", words="whole", phrase="containing {x}")
_relation("word", "member", "word", words="member", phrase="of {x}")
_relation("word", "collection", "word", of="word.member", words="collection", phrase="including {x}")
_relation("word", "material", "word", words="material", phrase="found in {x}")
_relation("word", "product", "word", of="word.material", words="thing", phrase="made with {x}")
_relation("word", "topic", "word", words="subject", phrase="of {x}")
_relation("word", "term", "word", of="word.topic", words="term", phrase="used in {x}")
_relation("word", "opposite", "word", words="opposite", phrase="of {x}")

_attributes(
    "airport",
    elevation=("highest elevation", "lowest elevation"),
    latitude=("northernmost position", "southernmost position"),
)
_attributes(
    "city",
    population=("largest population", "smallest population"),
    latitude=("northernmost position", "southernmost position"),
    longitude=("easternmost position", "westernmost position"),
)
_attributes("country", population=("largest population", "smallest population"), area=("largest area", "smallest area"))
_attributes("track", length=("longest playing time", "shortest playing time"), size=("largest file", "smallest file"))
_attributes("customer", spending=("highest spending", "lowest spending"))
_attributes("employee", birth_year=("latest year of birth", "earliest year of birth"))
_attributes(
    "element",
    atomic_number=("highest atomic number", "lowest atomic number"),
    density=("highest density", "lowest density"),
    melting_point=("highest melting point", "lowest melting point"),
    discovery_year=("latest discovery", "earliest discovery"),
    abundance=("greatest share of the earth's crust", "smallest share of the earth's crust"),
)
_attributes(
    "word",
    frequency=("most frequent use", "least frequent use"),
    depth=("deepest place in the hierarchy", "highest place in the hierarchy"),
)

# What `quick` shows. Every type a quick question passes has three to five relations: enough that a guess is rarely
# right, few enough that a list costs a dozen tokens.
QUICK: dict[str, tuple[str, ...]] = {
    "airport": ("city", "country", "zone", "region"),
    "city": ("country", "zone", "region", "airport"),
    "region": ("country", "zone", "city", "airport"),
    "zone": ("country", "region", "city", "airport"),
    "country": ("capital", "currency", "continent", "language", "neighbour"),
    "currency": ("country",),
    "continent": ("country",),
    "language": ("country",),
    "track": ("album", "genre", "composer", "format"),
    "album": ("artist", "genre", "format", "track"),
    "artist": ("genre", "composer", "format", "album"),
    "composer": ("genre", "artist", "album", "track"),
    "genre": ("track", "album", "artist"),
    "format": ("track",),
}
_ALL: dict[str, tuple[str, ...]] = {source: tuple(named) for source, named in RELATIONS.items()}
VIEWS: dict[str, dict[str, tuple[str, ...]]] = {"quick": QUICK, "standard": _ALL, "hard": _ALL, "expert": _ALL}
DEEP = ("hard", "expert")  # the levels of `deep`

# How many neighbours an entity has along a relation, as an attribute; the words are used by `deep` alone.
COUNTS: dict[str, dict[str, Attribute]] = {}
for _source, _named in RELATIONS.items():
    for _r in _named.values():
        if not _r.single:
            _of_it = "" if _r.phrase == "of {x}" else " " + _r.phrase.format(x="it")
            _words = f"{_r.many}{_of_it}"
            COUNTS.setdefault(_source, {})[f"{_r.name} count"] = Attribute(
                _source, f"{_r.name} count", f"most {_words}", f"fewest {_words}"
            )
