"""The documentation's checks pass on the documentation, and fail on what they are for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_docs  # noqa: E402

from springtide.config import RESUMABLE, Config, load_config  # noqa: E402
from springtide.models.presets import SHIPPED  # noqa: E402


@pytest.mark.parametrize("page", check_docs.find_pages(ROOT), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_page_shows_exists_and_works(page: Path) -> None:
    assert check_docs.check_page(ROOT, page) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_an_example_is_ready_to_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from springtide.trainer.start import check_run

    monkeypatch.chdir(ROOT)
    model = load_config(path).model.path  # of some examples it is a reader's own, or is made by a script
    placeholder = () if model in SHIPPED else ("model.path=springtide-nano", "model.context=1024")
    check_run(load_config(path, placeholder))


def test_every_option_has_a_meaning_and_a_row() -> None:
    rows = [row for row in check_docs.options().splitlines() if row.startswith("| `")]
    assert all(row.split("|")[-2].strip() for row in rows), "an option without a description in config.py"

    def keys(table: type) -> int:
        return sum(
            keys(f.annotation) if hasattr(f.annotation, "model_fields") else 1 for f in table.model_fields.values()
        )

    entry = len(Config.model_fields["suites"].annotation.__args__[0].model_fields)
    assert len(rows) == keys(Config) - 1 + entry
    assert all(f"`{key}`" in check_docs.resumable() for key in RESUMABLE)


def test_a_page_that_is_behind_the_configuration_is_told(tmp_path: Path) -> None:
    page = _repository(tmp_path, "configuration.md")
    page.write_text(
        (ROOT / check_docs.CONFIGURATION).read_text().replace("| `seed` |", "| `sead` |").split("## ")[0] + _PARTS
    )
    assert any("--write" in fault for fault in check_docs.check_page(tmp_path, page))


_PARTS = "<!-- generated: resumable -->\n<!-- end -->\n<!-- generated: options -->\n<!-- end -->\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see [there](missing.md)", "missing.md leads nowhere"),
        ("see [there](page.md#no-such-part)", "names a heading that is not there"),
        ("see [outside](../../etc)", "leads nowhere"),
        ("<!-- examples/none.py -->\n```python\nx\n```\n", "has no such file"),
        ("<!-- Makefile -->\n```\nother: words\n```\n", "is not what the file says"),
        ("see `tests/test_docs.py::test_nothing`", "is no test"),
        ("see `trainer/nothing.py`", "neither in the repository nor in the package"),
        ("run `make everything`", "no target everything"),
        ("run `python scripts/none.py`", "there is no scripts/none.py"),
        ("run `springtide dance`", "dance"),
        ("run `springtide train`s missing `springtide train CONFIG --fast`", "--fast"),
        ("```\nspringtide eval RUN --tasks 0\n```\n", "--tasks"),
        ("```\nspringtide train CONFIG --set trainer.speed=1\n```\n", "trainer.speed"),
        ("```\nspringtide train none.toml\n```\n", "none.toml"),
    ],
)
def test_a_page_that_shows_what_is_not_there_is_told(tmp_path: Path, text: str, fault: str) -> None:
    page = _repository(tmp_path, "page.md")
    page.write_text(f"# A page\n\n{text}\n")
    (found,) = check_docs.check_page(tmp_path, page)
    assert fault in found


_GOOD = """# A page

## Its part

[up](#its-part) [self](page.md#a-page) [web](https://example.org/x) `springtide COMMAND --help`, `make test`,
`springtide eval RUN --suite S --split P`, `springtide train CONFIG [--resume]`, `springtide train`

```
$ springtide train CONFIG --set 'suites=[{use="kg"}]'  # three
```
"""


def test_placeholders_signatures_and_links_elsewhere_pass(tmp_path: Path) -> None:
    page = _repository(tmp_path, "page.md")
    page.write_text(_GOOD)
    assert check_docs.check_page(tmp_path, page) == []


def _repository(root: Path, name: str) -> Path:
    """A place with what the checks look at: a Makefile, the quickstart's configuration, docs/."""
    (root / "docs").mkdir()
    (root / "Makefile").write_text("test: setup\n")
    preset = root / "src/springtide/cli/quickstart.toml"
    preset.parent.mkdir(parents=True)
    preset.write_text((ROOT / preset.relative_to(root)).read_text())
    return root / "docs" / name
