"""Pages of commands: sound as all are, with the numbers that the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.report.every_page import PAGES
from unit.report.html_page import HtmlPage, require_sound

OF_COMMANDS = ("matrix", "versions")
"""Those that no other module of tests is about."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the page goes."""
    return tmp_path / "page.html"


def read(file: Path) -> HtmlPage:
    """The page that was written."""
    return HtmlPage(file.read_text("utf-8"))


@pytest.mark.parametrize("name", OF_COMMANDS)
def test_a_page_is_one_small_file_that_can_be_read_aloud(file: Path, name: str) -> None:
    """Whatever it is about; and there is something in each of its sections."""
    PAGES[name](file)
    page = read(file)
    require_sound(page)
    sections = page.root.findall(".//section")
    assert sections
    assert all(len(section) > 1 for section in sections)


def test_versions_mark_what_is_not_on_file(file: Path) -> None:
    """Beside what each script did, in more than colour."""
    PAGES["versions"](file)
    page = read(file)
    rows = {row[0]: row[1:] for row in page.rows("scripts")}
    assert rows["tensor_parallel_unfreezes"] == [">=2.9,<2.11", "○ !", "○"]
    assert "1 diverged: because" in page.said("wrong")
    assert "sim 0/1, gloo 0/1" in page.said("corpus")
