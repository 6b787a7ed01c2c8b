"""Examples in README and docs run and print the shown output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import pages

IDS = [str(page.relative_to(pages.ROOT)) for page in pages.PAGES]
LANGUAGES = {"python", "text", "console", "sh", "toml", "yaml"}


SLOW = ("tutorial.md", "your_model.md", "matrix.md", "golden_trace.md")
"""Pages whose trainings take seconds; torch environments run them."""
OF_ITS_TIME = pytest.mark.torch(">=2.12,<2.14", "it shows what was wrong in these versions, and mended in the next")


def _marks(page: Path) -> Iterator[pytest.MarkDecorator]:
    if page.name in SLOW:
        yield pytest.mark.slow
    if page.name == "operations.md":
        yield OF_ITS_TIME


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=identifier, marks=[*_marks(page)]) for page, identifier in zip(pages.PAGES, IDS, strict=True)],
)
def test_what_a_page_shows_happens(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code runs and prints the output below it."""
    monkeypatch.chdir(tmp_path)
    assert pages.run(page) == []


@pytest.mark.parametrize("page", pages.PAGES, ids=IDS)
def test_commands_that_do_not_run_exist(page: Path) -> None:
    """Their options exist too."""
    for example in pages.examples(page):
        assert example.language in LANGUAGES, f"{page.name}:{example.line}: who runs {example.language!r}?"
        if example.language == "sh":
            for command in example.text.splitlines():
                pages.parse(command)


@pytest.mark.parametrize("page", pages.PAGES, ids=IDS)
def test_links_lead_to_files(page: Path) -> None:
    """Links to pages and files resolve; generated pages only need a valid folder."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        path = (page.parent / target).resolve()
        assert path.exists() or path.parent.name == "generated", f"{page.name}: {target}"


@pytest.mark.parametrize("page", sorted((pages.ROOT / "docs" / "internals").glob("*.md")), ids=lambda page: page.stem)
def test_files_that_internals_name_exist(page: Path) -> None:
    """A path starts at the repository, at the package `equivcheck`, or at the page's own folder in it."""
    starts = (pages.ROOT, pages.ROOT / "equivcheck", pages.ROOT / "equivcheck" / page.stem)
    for name in re.findall(r"`([\w/]+(?:\.\w+|/))`", page.read_text("utf-8")):
        if "/" in name or name.endswith(".py"):
            assert any((start / name).exists() for start in starts), f"{page.name}: {name}"


def test_readme_is_short() -> None:
    """The README is for a reader with two minutes."""
    assert len(pages.PAGES[0].read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("DIVERGED: ddp on 2 ranks", "EQUIVALENT: ddp on 2 ranks"),
        ("expected 0.5296573195692034", "expected 0.5296673195692034"),
        ("expected 0.5", ""),
        ("first: step 0\nthen: step 1", "then: step 1\nfirst: step 0"),
    ],
)
def test_what_is_not_printed_is_noticed(shown: str, printed: str) -> None:
    """Another outcome, number or order is an error, and so is a missing line."""
    assert pages.missing(shown, printed, "page.md:1").startswith("page.md:1: ")


def test_numbers_of_a_tolerance_are_not_compared() -> None:
    """They depend on the processor."""
    printed = "actual 1.5 (4e+14 x tolerance)\nthen: a\nwhy: a b"
    assert not pages.missing("actual 1.5 (4.74e+14 x tolerance)\n...\nwhy: b", printed, "page.md:1")


@pytest.mark.parametrize("command", ["equivcheck fuss", "equivcheck fuzz --hours 1"])
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    """Unknown commands and unknown options are errors."""
    with pytest.raises(Exception, match=r"No such (command|option)"):
        pages.parse(command)
