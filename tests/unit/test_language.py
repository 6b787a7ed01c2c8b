"""The English of the project stays readable: rates of a few words, first words of docstrings, and names of public functions.

The limits are the rates in the documentation of pluggy, structlog, attrs and torchtitan, with some room. `frozen_language.json`
lists the texts that do not reach them yet. It may only shrink: a test fails if an entry is no longer needed. If a test here fails
for your text, do not swap words. Write the sentence again, as subject, verb and object.

To write the list again after you improved something: `python -m tests.unit.test_language`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("frozen_language.json")

AT_MOST = {("what",): 3, ("of",): 22, ("where",): 2, ("that", "which"): 20}
"""Largest number per 1,000 words."""
AT_LEAST = {("if", "because", "since"): 4}
"""Smallest number per 1,000 words. A text with fewer hides its conditions and reasons in noun phrases."""
YOU = ("you", "your")
AT_LEAST_FOR_READERS = 8
"""Smallest number of `YOU` per 1,000 words in pages that tell you how to do something."""

BANNED_FIRST = re.compile(
    r"(what|which|those|these|that|its|of|as|by|from|where|whose|more|and|or|also|there|the same)\b", re.IGNORECASE
)
"""First words after which a docstring cannot be read without the code."""

BARE_WORDS = re.compile(
    r"able|after|again|alone|alike|around|before|below|beside|broken|busy|by|can|drawn|drowned|first|flat|forked|frozen|given|grown|having|"
    r"held|kept|kin|known|last|left|lost|made|of|off|old|only|others|over|own|ready|said|same|shown|shrunk|sought|spent|stray|swept|taken|"
    r"then|these|those|told|undrawn|unread|unseen|untied|unwaited|which|whole|whose|within|without|written|wrong|"
    r"(?!.*(?:need|seed|feed|shed|speed|shred|embed)$)\w{3,}ed"
)
"""Adjectives, participles and prepositions that say nothing as the whole name of a public function."""


def _markdown_groups() -> Iterator[tuple[str, list[Path]]]:
    for path in sorted(ROOT.glob("*.md")):
        yield path.name, [path]
    docs = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "generated" not in path.relative_to(ROOT / "docs").parts]
    for folder in sorted({path.parent for path in docs}):
        yield folder.relative_to(ROOT).as_posix(), [path for path in docs if path.parent == folder]


def _package_groups() -> Iterator[tuple[str, list[Path]]]:
    for folder in sorted((ROOT / "equivcheck").iterdir()):
        if folder.is_dir() and (folder / "__init__.py").exists():
            files = [path for path in sorted(folder.rglob("*.py")) if "scripts" not in path.parts]
            yield f"equivcheck/{folder.name}", files


PAGES = dict(_markdown_groups())
PACKAGES = dict(_package_groups())


def _prose(page: str) -> str:
    """Text of a Markdown page without code, tables, headings and links."""
    parts, fenced = [], False
    for line in page.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "#", "\t")):
            parts.append(re.sub(r"\]\([^)]*\)|https?://\S+", " ", line))
    return "\n".join(parts)


@cache
def _docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and text of each docstring, those of fields and constants included."""
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    statements = (statement for body in bodies if isinstance(body, list) for statement in body)
    return tuple(
        (statement.lineno, statement.value.value)
        for statement in statements
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _text(group: str) -> str:
    if group in PAGES:
        return "\n".join(_prose(path.read_text("utf-8")) for path in PAGES[group])
    return "\n".join(text for path in PACKAGES[group] for _, text in _docstrings(path))


def rates(text: str) -> dict[tuple[str, ...], float]:
    """Occurrences per 1,000 words of each group of words. Code in backticks does not count."""
    words = re.findall(r"[a-z']+", re.sub(r"`[^`]*`", " ", text).lower())
    count = Counter(words)
    return {group: 1000 * sum(count[word] for word in group) / max(len(words), 1) for group in (*AT_MOST, *AT_LEAST, YOU)}


def violations(group: str) -> dict[str, float]:
    """Rates of a group that are out of bounds, rounded to one place, by the words they count."""
    found = rates(_text(group))
    least = {**AT_LEAST, **({YOU: AT_LEAST_FOR_READERS} if _is_for_readers(group) else {})}
    wrong = [words for words, most in AT_MOST.items() if round(found[words], 1) > most]
    wrong += [words for words, few in least.items() if round(found[words], 1) < few]
    return {"/".join(words): round(found[words], 1) for words in wrong}


def _is_for_readers(group: str) -> bool:
    return group in ("README.md", "CONTRIBUTING.md", "docs", "docs/howto")


def banned_docstrings(group: str) -> int:
    """Number of docstrings that begin with a banned word, so that they do not stand alone."""
    return sum(bool(BANNED_FIRST.match(text.strip())) for path in PACKAGES[group] for _, text in _docstrings(path))


def bare_names(group: str) -> list[str]:
    """Public functions and methods whose whole name is an adjective, a participle or a preposition."""
    names = {
        node.name
        for path in PACKAGES[group]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "_" not in node.name
    }
    return sorted(name for name in names if BARE_WORDS.fullmatch(name))


@cache
def _frozen() -> dict[str, dict[str, dict[str, float | list[str]]]]:
    frozen: dict[str, dict[str, dict[str, float | list[str]]]] = json.loads(FROZEN.read_text("utf-8"))
    return frozen


@pytest.mark.parametrize("group", [*PAGES, *PACKAGES])
def test_texts_state_conditions_and_reasons_and_name_their_subjects(group: str) -> None:
    """A rate is within its limit, or no worse than the frozen one."""
    frozen = _frozen()["rates"].get(group, {})
    found = violations(group)
    assert sorted(frozen) == sorted(found), f"{group}: rates out of bounds {found}, frozen {frozen}"
    for words, rate in found.items():
        allowed = frozen[words]
        assert isinstance(allowed, float | int)
        is_least = words.split("/")[0] in ("if", "you")
        assert rate >= allowed if is_least else rate <= allowed, (
            f"{group}: {words} {rate} per 1,000 words is worse than {allowed}"
        )


@pytest.mark.parametrize("group", PACKAGES)
def test_docstrings_stand_alone(group: str) -> None:
    """No docstring begins with a word that continues the name above it."""
    assert banned_docstrings(group) == _frozen()["first words"].get(group, 0)


@pytest.mark.parametrize("group", PACKAGES)
def test_public_functions_are_named_by_verbs_or_noun_phrases(group: str) -> None:
    """No public function has a bare adjective, participle or preposition as its name, but for those on the list."""
    assert bare_names(group) == _frozen()["names"].get(group, [])


def test_a_text_in_our_old_style_is_out_of_bounds() -> None:
    """The measure tells the style that it is there to prevent."""
    old = (
        "What compiles has a share of what a worker has of time, of which a tenth is of that of programs where ranks lie as told."
    )
    new = (
        "If a scenario is compiled, it gets one tenth of the worker's time, because compiling is slow. You can change the share."
    )
    assert all(rates(old)[words] > most for words, most in AT_MOST.items() if words[0] in ("what", "of"))
    assert all(rates(new)[words] <= most for words, most in AT_MOST.items() if words != ("of",))
    assert rates(new)["if", "because", "since"] >= 4


def _write() -> None:
    frozen = {
        "rates": {group: found for group in (*PAGES, *PACKAGES) if (found := violations(group))},
        "first words": {group: count for group in PACKAGES if (count := banned_docstrings(group))},
        "names": {group: names for group in PACKAGES if (names := bare_names(group))},
    }
    FROZEN.write_text(json.dumps(frozen, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
