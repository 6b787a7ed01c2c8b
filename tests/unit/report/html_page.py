"""A page as its readers, and their browsers, find it."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

LARGEST = 500_000
"""Bytes of a page."""
_FROM_ELSEWHERE = {"script", "link", "img", "iframe", "object", "embed", "base", "image"}


class HtmlPage:
    """Of any kind; it must be XML as well, so that every element ends where it should."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.root = ET.fromstring(source)

    @property
    def text(self) -> str:
        """All of its body, with single spaces."""
        return " ".join("".join(self.root.find("body").itertext()).split())  # type: ignore[union-attr]

    def rows(self, section: str) -> list[list[str]]:
        """The cells of the tables of a section, without the titles of drawings."""
        found = self.root.findall(f".//section[@id='{section}']//tr")
        return [["".join(cell.itertext()).strip() for cell in row if cell.find("svg") is None] for row in found]

    def said(self, section: str) -> str:
        """The text of a section, with single spaces."""
        (found,) = self.root.findall(f".//section[@id='{section}']")
        return " ".join("".join(found.itertext()).split())

    def values(self, name: str) -> list[str]:
        """Of all attributes of a name."""
        return [element.attrib[name] for element in self.root.iter() if name in element.attrib]


def require_sound(page: HtmlPage) -> None:
    """What every page must be: small, of one file, and fit to be read by keyboard and aloud."""
    assert len(page.source.encode()) <= LARGEST
    _require_one_file(page)
    _require_headings(page)
    _require_drawings(page)
    _require_tables(page)


def _require_one_file(page: HtmlPage) -> None:
    """No script, no picture, no font: only links, which nobody has to follow; and those within it lead somewhere."""
    assert not {element.tag for element in page.root.iter()} & _FROM_ELSEWHERE
    assert not page.values("src")
    assert not re.search(r"url\(|@import", page.source)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for target in page.values("href"):
        assert target.startswith("https://") or target.removeprefix("#") in ids
    assert set(page.values("aria-labelledby")) <= set(ids)
    assert page.root.attrib["lang"]


def _require_headings(page: HtmlPage) -> None:
    """One of the first level, then down by one level at most."""
    levels = [int(element.tag[1]) for element in page.root.iter() if re.fullmatch(r"h\d", element.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(lower <= higher + 1 for higher, lower in pairwise(levels))


def _require_drawings(page: HtmlPage) -> None:
    """Each says what it shows."""
    for drawing in page.root.iter("svg"):
        assert drawing.attrib["role"] == "img"
        assert drawing[0].tag == "title"
        assert (drawing[0].text or "").strip()


def _require_tables(page: HtmlPage) -> None:
    """Headings say of what; what is wider than a phone scrolls by keyboard, and has a name."""
    for heading in page.root.iter("th"):
        assert heading.attrib["scope"] in {"row", "col"}
    names = []
    for region in page.root.iter():
        if region.attrib.get("role") == "region":
            assert region.attrib["tabindex"] == "0"
            names.append(region.attrib["aria-label"])
    assert all(names)
    for text in page.root.iter("pre"):
        assert text.attrib["tabindex"] == "0"
