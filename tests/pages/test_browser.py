"""Every kind of page in a browser: accessible in light and dark, no wider than a phone or than paper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from unit.report.every_page import PAGES, every_page

_INSTALLED = ("chromium", "google-chrome", "chromium-browser")
_SERIOUS = ("serious", "critical")
_PHONE, _PAPER = 390, 718
"""Widths in pixels: of a phone, and of A4 within its margins."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages by name."""
    return every_page(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The one that CHROMIUM names, or that is installed, or that playwright has."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _INSTALLED)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab that runs the scripts of tests, which the pages have none of."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(page: Page, files: dict[str, Path], name: str) -> None:
    """Nor anything worse; in both colour schemes, with all that can be opened open."""
    page.goto(files[name].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        violations = Axe().run(page).response["violations"]
        serious = [(each["id"], each["nodes"][0]["html"][:200]) for each in violations if each["impact"] in _SERIOUS]
        assert not serious, scheme


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_a_phone_or_than_paper(page: Page, files: dict[str, Path], name: str) -> None:
    """Only regions of it scroll sideways; on paper, where nothing can, not even those do."""
    page.goto(files[name].as_uri())
    page.set_viewport_size({"width": _PHONE, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= _PHONE
    page.emulate_media(media="print")
    page.set_viewport_size({"width": _PAPER, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= _PAPER


def test_a_page_asks_for_nothing(page: Page, files: dict[str, Path]) -> None:
    """No request but for the file itself."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for file in files.values():
        page.goto(file.as_uri())
    assert asked == [file.as_uri() for file in files.values()]
