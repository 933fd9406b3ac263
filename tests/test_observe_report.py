"""What people look at: report, curve and viewer over a real run, whole, partial, killed and hostile."""

from __future__ import annotations

import html.parser
import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_support import run_config

import springtide
from springtide.config import ConfigError
from springtide.observe.charts import nice_ticks
from springtide.observe.markup import tag
from springtide.observe.plots import smooth, write_curve
from springtide.observe.report import render, write_report
from springtide.observe.runview import RunView
from springtide.observe.sinks import read_records
from springtide.observe.spent import CAUSES, merged, seconds_of
from springtide.observe.view import Viewer, open_viewer
from springtide.schedule.policy import Wait
from springtide.trace import Group, Message, ToolCall

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\x00\x1b[31m\ud800"


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with both evaluations."""
    config = run_config(
        tiny_model, tmp_path_factory.mktemp("observe"), run={"steps": 4}, eval={"at_ends": True, "tasks": 6},
    )  # fmt: skip
    springtide.train(config)
    return config.run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Reader(html.parser.HTMLParser):
    """The page as a browser would see it: elements with attributes, and the text outside script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._hidden, self._open = "", 0, []
        self.feed(page)
        assert self._open == [], f"unclosed {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += f"{data}\n"

    def of(self, name: str, key: str, value: str) -> list[dict[str, str | None]]:
        return [a for n, a in self.elements if n == name and value in (a.get(key) or "").split()]


def read(run: Path) -> Reader:
    return Reader(render(RunView.open(run)))


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_the_run_directory_says(run: Path) -> None:
    assert write_report(run) == run / "report.html"
    page = Reader((run / "report.html").read_text())
    summary = json.loads((run / "summary.json").read_text())
    for key in ("success_start", "success_end", "greedy_start", "greedy_end"):
        assert f"{summary[key]:.1%}" in page.text
    assert "finished" in page.text and "step 4 of 4" in page.text and "letters" in page.text
    assert f"{summary['loss_tokens']:,}" in page.text
    assert "every drawn member is accounted for" in page.text and f"{summary['ledger']['drawn']:,}" in page.text
    assert (run / "config.toml").read_text().strip() in page.text
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_one_file_that_asks_the_network_for_nothing(run: Path) -> None:
    page = read(run)
    assert {a["href"][0] for _, a in page.elements if a.get("href")} == {"#"}
    assert not any(key in a for _, a in page.elements for key in ("src", "srcset", "data", "poster"))
    assert [n for n, _ in page.elements].count("script") == 1
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(ids) == len(set(ids)), "ids repeat"
    assert {a["href"][1:] for _, a in page.elements if a.get("href")} <= set(ids)


def judge(run: Path, label: str, successes: set[int]) -> None:
    """Let these tasks of an evaluation have succeeded, and no others."""
    for path in (run / "trajectories").glob(f"eval-{label}-letters-*"):
        group = Group.load(path)
        (old,) = group.trajectories
        good = group.task.index in successes
        outcome = replace(old.outcome, success=good, reward=float(good))
        replace(group, trajectories=(replace(old, outcome=outcome),)).save(path)


def test_the_same_tasks_stand_side_by_side_before_and_after(run: Path) -> None:
    for label in ("start", "end", "start-greedy", "end-greedy"):
        judge(run, label, set())
    page = read(run)
    kept = [p for p in (run / "trajectories").glob("eval-start-*") if "greedy" not in p.name]
    boxes = page.of("details", "class", "pairbox")
    assert len(kept) == 6 and {p.stem for p in sorted(kept)[:4]} <= {str(b["id"]) for b in boxes}
    said = Group.load(sorted((run / "trajectories").glob("eval-end-letters-*"))[0]).trajectories[0].messages[0].text
    assert said in page.text
    assert len(boxes) == 8  # sampled and greedy
    assert [n for n, _ in page.elements].count("h4") == 2 * len(boxes)


@pytest.mark.parametrize("learned", [2, 5])
def test_a_task_that_was_learned_is_chosen_beside_the_first_ones(run: Path, learned: int) -> None:
    """Of six kept tasks a suite the first four are shown: in most runs none of them changed."""
    for label, successes in (("start", {1}), ("end", {1, learned}), ("start-greedy", set()), ("end-greedy", set())):
        judge(run, label, successes)
    page = read(run)
    boxes = [b for b in page.of("details", "class", "pairbox") if "greedy" not in str(b["id"])]
    assert [str(b["id"])[-1] for b in boxes] == [*"0123", *("5" if learned == 5 else "")]
    assert [str(b["id"])[-1] for b in boxes if "open" in b] == [str(learned)]
    assert page.text.count("chosen: failed before, succeeds after") == 1


def test_what_a_run_starts_from_after_a_cold_start_is_called_so(run: Path) -> None:
    assert "after cold start" not in read(run).text and "greedy, start" in read(run).text
    text = (run / "config.toml").read_text()
    table = text[text.index("[trainer.cold_start]") :]
    (run / "config.toml").write_text(text.replace(table, table.replace("steps = 0", "steps = 30", 1)))
    page = read(run)
    assert "greedy, after cold start" in page.text and "start → end" not in page.text.replace("cold start → end", "")


def test_a_run_that_minutes_end_is_shown_in_minutes(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("[run]\n", "[run]\nminutes = 6.0\n", 1))
    assert "step 4 · 0." in read(run).text and " of 6.0 min" in read(run).text


def test_a_cause_of_waiting_has_one_name(run: Path) -> None:
    """The board said stale_group, the report "wait for a late group"."""
    assert [name.replace("wait: ", "wait_") for name, _ in CAUSES.values()] == list(CAUSES)
    waits = get_args(get_type_hints(Wait)["cause"])
    assert {f"wait_{cause}" for cause in waits} == {cause for cause in CAUSES if cause.startswith("wait_")}


def test_every_table_scrolls_by_itself_where_the_screen_is_narrow(run: Path) -> None:
    found: list[bool] = []
    path: list[str] = []  # the classes of the open elements

    class Tables(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "table":
                found.append("scroll" in path[-1].split())
            path.append(dict(attrs).get("class") or "")

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

        def handle_endtag(self, tag: str) -> None:
            path.pop()

    Tables().feed(render(RunView.open(run)))
    assert len(found) > 5 and all(found)


def test_time_in_the_timeline_adds_up_to_the_run(run: Path) -> None:
    steps = RunView.open(run).steps
    spans = merged([(r, seconds_of(r)) for r in steps], most=2)
    assert [s[0] for s in spans] == ["step 1 to 2", "step 3 to 4"]
    assert math.isclose(spans[-1][2], steps[-1]["t"])
    assert all(math.isclose(sum(seconds_of(r).values()), r["step_s"], rel_tol=1e-9) for r in steps)
    assert read(run).of("figure", "class", "wide")


@given(st.dictionaries(st.sampled_from([*CAUSES, "napping"]), st.floats(0, 1e4)), st.floats(0, 1e4))
def test_the_parts_of_a_step_add_up_to_its_wall_time(seconds: dict[str, float], step_s: float) -> None:
    parts = seconds_of({"seconds": seconds, "step_s": step_s})
    assert sum(parts.values()) == pytest.approx(step_s, rel=1e-9, abs=1e-9) and set(parts) <= set(CAUSES)
    assert all(value >= 0 for value in parts.values())


def test_the_clock_of_a_run_claims_no_more_than_there_is(run: Path) -> None:
    page = read(run)
    assert "The parts of a bar add up" in page.text and "more than there are" not in page.text
    records = read_records(run / "metrics.jsonl")
    for r in records:
        if r["kind"] == "step" and r["step"] < 3:
            r["seconds"]["train"] += 2 * r["step_s"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "In 2 steps causes claim" in read(run).text


def test_a_live_runs_ranks_groups_and_staleness_are_shown(run: Path) -> None:
    page = read(run)
    for said in ("Rank timeline", "KV of each playing rank", "Staleness of trained groups", "engine-0: ", "trainer: "):
        assert said in page.text
    trained = sum(r["groups"] for r in read_records(run / "metrics.jsonl") if r["kind"] == "step")
    assert f"over {trained} groups" in page.text


def test_a_torn_or_missing_record_of_events_costs_only_what_it_told(run: Path) -> None:
    with open(run / "events.jsonl", "ab") as file:
        file.write(b'{"kind": "Ready", "t": 1e9, "visit": 99999}\n{"kind": "Rea')
    page = read(run)
    assert "1 event contradicts what came before" in page.text and "Rank timeline" in page.text
    (run / "events.jsonl").unlink()
    page = read(run)
    assert "No event yet." in page.text and "The parts of a bar add up" in page.text


def test_every_figure_of_a_run_is_defined_in_the_docs(run: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    by_name = {"success", "reward", "mixture", "seconds", "status", "dropped", "env_errors", "discarded_tokens"}
    by_name |= {"restarts", "refused_actions", "trainer.seconds", "pass_at", "greedy_status", "per_suite", "ledger"}

    def undefined(record: dict[str, Any], prefix: str = "") -> list[str]:
        missing = []
        for key, value in record.items():
            name = f"{prefix}{key}"
            if name == "suites":
                missing += [m for suite in value.values() for m in undefined(suite)]
            elif isinstance(value, dict) and name not in by_name and name != "tokens":
                missing += undefined(value, f"{name}.")
            elif f"`{name}`" not in text:
                missing.append(name)
        return missing

    for record in [*read_records(run / "metrics.jsonl"), json.loads((run / "summary.json").read_text())]:
        assert undefined(record) == []


# --- partial and damaged runs -----------------------------------------------------------------------------------------


def test_a_killed_run_is_reported_as_far_as_it_came(run: Path) -> None:
    records = [r for r in (run / "metrics.jsonl").read_text().splitlines() if '"label": "end"' not in r]
    (run / "metrics.jsonl").write_text(
        "\n".join(records[:3]) + '\n{"kind": "step", "st'
    )  # start, two steps, a torn one
    (run / "summary.json").unlink()
    for path in (run / "trajectories").glob("eval-end-*"):
        path.unlink()
    page = read(run)
    assert "step 2 of 4" in page.text and "not finished" in page.text
    assert "This evaluation has not run." in page.text
    write_report(run)


def test_a_summary_from_before_a_resume_does_not_call_the_run_finished(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "resume", "step": 4, "incarnation": 1}\n')
    page = read(run)
    assert "not finished" in page.text and "Resumed at step 4 (incarnation 1)." in page.text


@pytest.mark.parametrize("damage", [b"", b'{"steps": 4, "wall', b"[4]", b"\xff\xfe", b"{}"])
def test_a_torn_summary_is_no_summary(run: Path, damage: bytes) -> None:
    (run / "summary.json").write_bytes(damage)
    page = read(run)
    assert "not finished" in page.text and "step 4 of 4" in page.text


def test_lines_that_are_no_record_are_left_out_and_said(run: Path) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'3\n{"a": 1}\n\xff\n')
    page = read(run)
    assert "step 4 of 4" in page.text and "finished" in page.text
    assert "3 lines of metrics.jsonl could not be read and are left out" in page.text


def test_reading_a_run_changes_nothing_in_it(run: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert not isinstance(RunView.open(run).ledger, str)
    read(run)
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_a_run_that_was_only_evaluated_is_drawn_without_a_warning(run: Path) -> None:
    records = [r for r in read_records(run / "metrics.jsonl") if r.get("label") == "start"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_curve(records, run / "curve.png")


@pytest.mark.parametrize("left", [(), ("metrics.jsonl",), ("ledger.sqlite",), ("trajectories",)])
def test_what_is_not_there_yet_is_said(run: Path, left: tuple[str, ...]) -> None:
    for path in run.iterdir():
        if path.name not in ("config.toml", *left):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_report(run)
    page = read(run)
    assert ("No step yet." in page.text) == ("metrics.jsonl" not in left)
    assert ("No evaluation episodes were kept." in page.text) == ("trajectories" not in left)


def test_a_damaged_ledger_is_a_sentence(run: Path) -> None:
    for path in run.glob("ledger.sqlite*"):
        path.unlink()
    (run / "ledger.sqlite").write_bytes(b"not a database at all" * 100)
    assert "damaged" in read(run).text


def test_a_damaged_episode_file_costs_only_itself(run: Path) -> None:
    first, *others = sorted(p for p in (run / "trajectories").glob("eval-start-*") if "greedy" not in p.name)
    first.write_bytes(first.read_bytes()[:40])
    page = read(run)
    assert f"{first.name} cannot be read" in page.text
    assert {p.stem for p in others[:4]} <= {a.get("id") for a in page.of("details", "class", "pairbox")}


def test_an_evaluation_whose_environments_all_failed_has_no_figure(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for r in lines:
        if r["kind"] == "eval":
            r["success"] = math.nan
            r["suites"]["letters"] |= {"success": math.nan, "low": 0.0, "high": 1.0, "episodes": 0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    write_report(run)
    assert "nan" not in (run / "report.html").read_text().split("<main>")[1].split("<script>")[0]


# --- hostile text -----------------------------------------------------------------------------------------------------


def test_text_of_models_tools_and_tasks_is_shown_and_never_run(run: Path) -> None:
    (run / "metrics.jsonl").open("a").write(json.dumps({"kind": "note", "step": 4, "text": HOSTILE}) + "\n")
    for path in (run / "trajectories").glob("eval-start-letters-*"):
        group = Group.load(path)
        calls = (ToolCall("1", "<b>run", '{"<i>": "</code><script>"}'), ToolCall("2", "x", HOSTILE, error=HOSTILE))
        said = HOSTILE.replace("\ud800", "")  # what msgpack can hold
        messages = (
            Message("system", said),
            Message("assistant", said, tool_calls=calls[:1], reasoning_content=said),
            Message("tool", said * 30, name=said),
        )
        (old,) = group.trajectories
        outcome = replace(old.outcome, detail=said)
        replace(group, trajectories=(replace(old, messages=messages, outcome=outcome),)).save(path)
    page = read(run)
    assert [n for n, _ in page.elements].count("script") == 1
    assert not {"img", "i>", "iframe"} & {n for n, _ in page.elements}
    assert not any(key.startswith("on") for _, a in page.elements for key in a)
    assert "<script>alert('x')</script>" in page.text and "␀␛[31m" in page.text


@given(st.text(st.characters(codec=None), max_size=30), st.text(max_size=30))
def test_any_text_survives_as_child_and_as_attribute(child: str, attribute: str) -> None:
    page = tag("p", child, title=attribute)
    page.encode()
    reader = Reader(page)
    assert [n for n, _ in reader.elements] == ["p"]


# --- drawing ----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_cover_the_data_and_are_few(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert ticks[0] <= low + 1e-6 * span and ticks[-1] >= low + span - 1e-6 * span and 2 <= len(ticks) <= 7


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 9))
def test_smoothing_stays_within_the_data_and_keeps_its_length(values: list[float], width: int) -> None:
    out = smooth(values, width)
    assert len(out) == len(values)
    assert all(min(values) - 1e-9 <= v <= max(values) + 1e-9 for v in out)
    assert smooth(values, 1) == pytest.approx(values, abs=1e-9)


def test_a_long_run_is_drawn_in_bounded_size(run: Path) -> None:
    records = read_records(run / "metrics.jsonl")
    step = next(r for r in records if r["kind"] == "step")
    many = [{**step, "step": i + 1, "t": (i + 1) * step["step_s"]} for i in range(5000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in many))
    assert len(render(RunView.open(run))) < 1_500_000
    write_curve(many, run / "curve.png")


# --- the viewer -------------------------------------------------------------------------------------------------------


@contextmanager
def serving(run: Path, *, live: bool = False) -> Iterator[Viewer]:
    with open_viewer(run, port=0, live=live) as viewer:
        thread = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield viewer
        finally:
            viewer.shutdown()
            thread.join()


def get(viewer: Viewer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{viewer.url.rstrip('/')}{path}", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_viewer_shows_the_run_as_it_is_now(run: Path) -> None:
    with serving(run, live=True) as viewer:
        assert json.loads((run / "ports.json").read_text()) == {"view": viewer.port}
        status, page = get(viewer, "/")
        assert status == 200 and 'data-live="4.0"' in page and "step 4 of 4" in page
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"kind": "note", "step": 4, "text": "written just now"}\n')
        assert "written just now" in get(viewer, "/")[1]
        with open(run / "events.jsonl", "a") as file:
            file.write('{"kind": "RankLeft", "t": 4e9, "rank": "engine-0"}\n')
        assert "engine-0 left" in get(viewer, "/")[1]
    with serving(run) as viewer:
        assert "data-live=" not in get(viewer, "/")[1].split("<body")[1].split("<main>")[0]


def test_every_kept_episode_has_a_page(run: Path) -> None:
    names = sorted(p.name for p in (run / "trajectories").glob("*.msgpack"))
    with serving(run) as viewer:
        listed = Reader(get(viewer, "/groups")[1])
        links = [str(a["href"]) for _, a in listed.elements if (a.get("href") or "").startswith("/groups/")]
        assert sorted(link.removeprefix("/groups/") for link in links) == names
        for link in (links[0], links[-1]):
            status, page = get(viewer, link)
            assert status == 200 and "letters/quick/" in page and Reader(page).of("div", "class", "bubble")
        (run / "trajectories" / names[0]).write_bytes(b"\xc1 torn")
        status, page = get(viewer, f"/groups/{names[0]}")
        assert status == 200 and "cannot be read" in page


def test_a_page_that_cannot_be_made_says_why(run: Path) -> None:
    with serving(run) as viewer:
        (run / "config.toml").write_text("[run")
        status, page = get(viewer, "/")
        assert status == 500 and "cannot be made: TOMLDecodeError" in page and "Traceback" not in page
        assert get(viewer, "/groups")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/groups/../config.toml", "/groups/..%2fconfig.toml", "/groups/%2e%2e/%2e%2e/etc/passwd", "/groups//etc/passwd",
     "/groups/x.msgpack", "/config.toml", "/groups/", "/groups/..%5cconfig.toml", "/groups/%00", "/../config.toml"],
)  # fmt: skip
def test_no_request_reaches_a_file_that_is_not_listed(run: Path, path: str) -> None:
    with serving(run) as viewer, socket.create_connection(("127.0.0.1", viewer.port), timeout=20) as raw:
        raw.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())  # as typed: clients tidy paths up
        reply = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    assert reply.split()[1] == "404" and "[run]" not in reply and "root:" not in reply


def test_a_request_for_what_is_no_address_is_answered(run: Path) -> None:
    with serving(run) as viewer, socket.create_connection(("127.0.0.1", viewer.port), timeout=20) as raw:
        raw.sendall(b"GET http://[::1/ HTTP/1.0\r\n\r\n")
        reply = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    assert reply.split()[1] == "400" and "That is no address: Invalid IPv6 URL" in reply


@pytest.mark.parametrize("torn", [b'{"view": 50', b"[1]", b"\xff"])
def test_a_torn_file_of_ports_is_written_anew(run: Path, torn: bytes) -> None:
    (run / "ports.json").write_bytes(torn)
    with open_viewer(run, port=0) as viewer:
        assert json.loads((run / "ports.json").read_text()) == {"view": viewer.port}


def test_only_this_machine_can_connect(run: Path) -> None:
    with open_viewer(run, port=0) as viewer:
        assert viewer.server_address[0] == "127.0.0.1"


def test_bad_input_is_one_line_and_exit_2(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, said in (
            ([str(tmp_path / "nothing")], "holds no run"),
            ([str(run), "--port", port], f"port {port} is in use"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "springtide.cli.main", "view", *arguments],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and said in done.stderr


def test_ctrl_c_ends_the_viewer_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "springtide.cli.main", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        assert viewer.stdout.readline().startswith("http://127.0.0.1:")
        try:
            viewer.send_signal(signal.SIGINT)
            _, errors = viewer.communicate(timeout=30)
        finally:
            viewer.kill()
    assert viewer.returncode == 0 and errors == ""
