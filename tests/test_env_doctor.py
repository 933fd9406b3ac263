"""`springtide doctor env`: whatever an author's code does to its process, a report is printed and says what ran."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from springtide.cli.doctor import app
from springtide.env import examine

EXAMPLE = Path(__file__).parent.parent / "examples" / "shop.py"
BOUGHT = "        self.bought = item\n"


def doctor(use: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["env", use, "--tasks", "2", *options])


def write(directory: Path, *changes: tuple[str, str]) -> str:
    """The example with changes, as FILE.py:Class."""
    text = "import asyncio, os, signal, sys, time\n" + EXAMPLE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (directory / "shop.py").write_text(text)
    return f"{directory / 'shop.py'}:Shop"


def failures(result: Result) -> list[dict[str, str]]:
    (report,) = json.loads(result.stdout)
    assert len(report["verdicts"]) == 13, "every check has its line"
    return [verdict for verdict in report["verdicts"] if verdict["verdict"] == "failed"]


@pytest.mark.parametrize(
    ("old", "new", "check", "detail"),
    [
        (BOUGHT, "        os._exit(7)\n", "gold", "exit code 7 in Shop.buy, task shop/default/train/0"),
        (BOUGHT, "        os.kill(os.getpid(), 9)\n", "gold", "signal SIGKILL in Shop.buy, task"),
        (
            "    async def start(self):\n",
            "    async def start(self):\n        os._exit(0)\n",
            "gold",
            "0 in Shop.start, task",
        ),
        (
            "    async def score(self):\n",
            "    def score(self):\n        os._exit(4)\n",
            "gold",
            "4 in Shop.score, task",
        ),
        (
            "    async def score(self):\n",
            "    async def reply(self, text):\n        os._exit(5)\n\n    async def score(self):\n",
            "robustness",
            "5 in Shop.reply, task",
        ),
        (
            "        kinds = KINDS[split]\n",
            "        os._exit(6)\n",
            "tasks",
            "exit code 6 in Shop.tasks('train', 'default')",
        ),
    ],
)
def test_a_process_that_dies_is_one_finding_that_names_what_ran(
    tmp_path: Path, old: str, new: str, check: str, detail: str
) -> None:
    result = doctor(write(tmp_path, (old, new)), "--json")
    assert result.exit_code == 1
    (failed,) = failures(result)
    assert failed["check"] == check and detail in failed["detail"] and "\n" not in failed["detail"], failed
    after = json.loads(result.stdout)[0]["verdicts"][-1]
    assert (after["verdict"], after["detail"]) == ("skipped", f"the process had died during {check}")


def test_a_file_that_ends_its_process_on_import_is_refused_in_one_line(tmp_path: Path) -> None:
    use = write(tmp_path, ("KINDS = {", "os._exit(3)\nKINDS = {"))
    result = doctor(use)
    assert result.exit_code == 2
    assert result.output == f"suite {use}: the process died with exit code 3 on import of {use}\n"


def test_a_path_outside_ascii_is_examined_like_any_other(tmp_path: Path) -> None:
    directory = tmp_path / ("環境" * 40)  # 80 characters, 480 bytes as JSON escapes: longer than the notes that follow
    directory.mkdir()
    assert doctor(write(directory), "--split", "train").exit_code == 0


def test_a_cancellation_that_the_environment_raises_is_a_finding_with_its_line(tmp_path: Path) -> None:
    result = doctor(write(tmp_path, (BOUGHT, "        raise asyncio.CancelledError\n")), "--json")
    assert result.exit_code == 1
    assert any(
        f["check"] == "gold" and "Shop.buy raised CancelledError() (shop.py:" in f["detail"] for f in failures(result)
    )
    (tmp_path / "tasks").mkdir()
    use = write(tmp_path / "tasks", ("        kinds = KINDS[split]\n", "        raise asyncio.CancelledError\n"))
    result = doctor(use, "--json")
    (failed,) = failures(result)
    assert failed["detail"].endswith("tasks raised CancelledError() (shop.py:17)")
    rest = json.loads(result.stdout)[0]["verdicts"][2:]
    assert {(v["verdict"], v["detail"]) for v in rest} == {("skipped", "there are no tasks")}


def test_a_file_that_raises_a_cancellation_or_half_a_character_is_still_reported_on(tmp_path: Path) -> None:
    use = write(tmp_path, ("KINDS = {", "raise asyncio.CancelledError\nKINDS = {"))
    result = doctor(use)
    assert (result.exit_code, result.output) == (2, f"suite {use}: shop.py fails on import: CancelledError: \n")
    use = write(tmp_path, (BOUGHT, "        raise ValueError('\\ud800\\n\\nodd')\n"))
    assert "ValueError: ? odd (shop.py:" in failures(doctor(use, "--json"))[0]["detail"]


def test_a_call_that_blocks_its_process_is_a_finding_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_GRACE_S", 0.5)
    result = doctor(write(tmp_path, (BOUGHT, "        time.sleep(60)\n")), "--deadline", "0.5", "--json")
    (failed,) = failures(result)
    assert (
        failed["check"] == "gold"
        and "s in Shop.buy, task shop/default/train/0; the process was killed" in failed["detail"]
    )


def test_a_very_large_reply_is_a_warning_that_names_the_tool_and_its_size(tmp_path: Path) -> None:
    result = doctor(write(tmp_path, ('return "bought"', 'return "bought " * 40_000')))
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "replies" in line]
    assert line.split()[0] == "warning" and "Shop.buy gave 280 kB of text (shop/default/t" in line
    assert result.output.splitlines()[-1] == "13 checks: 1 warning"


def test_a_level_and_a_split_can_be_chosen_and_unknown_ones_are_one_line(tmp_path: Path) -> None:
    use = write(tmp_path, ("    max_turns = 8\n", "    max_turns = 8\n    levels = ('easy', 'hard')\n"))
    both = doctor(use)
    assert both.exit_code == 0 and [s for s in both.output.splitlines() if s[0] != " "] == [
        "shop, version 1, level easy",
        "shop, version 1, level hard",
        "26 checks: all ok",
    ]
    one = doctor(use, "--level", "hard", "--split", "test")
    assert one.exit_code == 0 and "tasks         test 200\n" in one.output and "easy" not in one.output
    odd = doctor(use, "--level", "odd")
    assert (odd.exit_code, odd.output) == (2, "suite shop has no level 'odd'; it has easy, hard\n")
    dev = doctor(use, "--split", "dev")
    assert (dev.exit_code, dev.output) == (2, "there is no split 'dev'; there are train, test, ood\n")


def test_what_the_environment_prints_goes_to_the_log_and_not_into_the_report(tmp_path: Path) -> None:
    use = write(tmp_path, (BOUGHT, BOUGHT + "        print('sold')\n"))
    result = doctor(use, "--json", "--log", str(tmp_path / "log"))
    assert json.loads(result.stdout)[0]["ok"] and "sold" in (tmp_path / "log").read_text()


def test_a_shared_value_that_fails_on_its_way_out_is_a_finding(tmp_path: Path) -> None:
    shared = (
        "    max_turns = 8\n\n    @classmethod\n    @contextlib.asynccontextmanager\n    async def shared(cls):\n"
        "        yield 1\n        raise OSError('cannot flush')\n"
    )
    use = write(tmp_path, ("    max_turns = 8\n", shared), ("import asyncio, ", "import asyncio, contextlib, "))
    (failed,) = failures(doctor(use, "--json"))
    assert failed["check"] == "shared" and "cannot flush" in failed["detail"]


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    noted = f"max_turns = 8; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    use = write(tmp_path, (BOUGHT, "        os._exit(7)\n"), ("max_turns = 8", noted))

    async def main() -> None:
        (report,) = await examine.examine(use, tasks=1)
        assert not report.ok

    asyncio.run(main())
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
