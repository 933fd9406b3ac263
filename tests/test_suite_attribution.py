"""What the suites say of their data's origins agrees with NOTICE."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("suite", ["db", "kg"])
def test_an_attribution_names_every_copyright_that_notice_names(suite: str) -> None:
    # kg's lacked the line of mwgg/Airports, whose MIT licence asks that it goes with every copy.
    notice = " ".join((ROOT / "NOTICE").read_text().split())
    section = re.search(rf"SUITE {suite} \(.*?(?=SUITE|MODEL)", notice)
    assert section is not None
    said = " ".join((ROOT / f"src/springtide/suites/{suite}/ATTRIBUTION.md").read_text().split())
    holders = re.findall(r"Copyright \([cC]\)[^.;]+", section[0])
    assert len(holders) >= 2
    for holder in holders:
        assert holder in said, holder
