"""Writes the HTML page that compares torch versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.frame.charts import stack_parts
from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.scenario.scenario import count
from equivcheck.system.files import replace_text

_MARKS = {"shows": "●", "does not": "○", "cannot run": "-"}

Cell = tuple[str, str, str]
"""CSS class, mark and title of a table cell."""


def write_page(
    file: Path, results: Mapping[str, Any], issues: Sequence[KnownIssue], wrong: Mapping[str, Sequence[str]], *, is_bad: bool
) -> None:
    """Write an HTML page about torch versions to `file`. `results` has the values that ``versions --json`` prints.

    `wrong` has lines about problems, by version: failed probes, findings, and scripts that contradict a known issue's versions.
    `is_bad` makes the headline say that some results are not as expected.
    """
    versions = results["versions"]
    values = {
        "title": f"equivcheck versions: {count(len(versions), 'version')} of torch",
        "headline": Headline(
            text="some results are not as expected" if is_bad else "all results are as expected", is_good=not is_bad
        ),
        "tiles": [],
        "facts": [
            ("corpus", f"{count(len(results['scenarios']), 'scenario')}, seed {results['seed']}"),
            ("scripts", count(len(results["issues"]), "known issue")),
            ("code", results["code"]),
        ],
        "footer": footer(),
        "versions": versions,
        "outcomes": list(_outcomes(versions)),
        "rows": [(version, *_row(found)) for version, found in versions.items()],
        "scripts": list(_scripts(versions, issues)),
        "wrong": {version: lines for version, lines in wrong.items() if lines},
    }
    replace_text(file, render("versions/versions.html.jinja", **values))


def _outcomes(versions: Mapping[str, Any]) -> Iterator[str]:
    """Outcomes with at least one scenario."""
    found = {each["outcome"] for version in versions.values() for each in version["corpus"]}
    return (outcome.value for outcome in Outcome if outcome.value in found)


def _row(found: Mapping[str, Any]) -> tuple[Counter[str], tuple[tuple[str, float, float], ...], list[tuple[str, int, int]]]:
    """Return scenario counts, the same counts as a bar, and for each world the numbers of working probes and all probes."""
    counts = Counter(each["outcome"] for each in found["corpus"])
    ordered = {outcome.value: counts[outcome.value] for outcome in Outcome}
    probes = found["probes"]
    worlds = dict.fromkeys(probe["world"] for probe in probes)
    works = {world: [probe["works"] for probe in probes if probe["world"] == world] for world in worlds}
    return counts, stack_parts(ordered, counts.total()), [(world, sum(each), len(each)) for world, each in works.items()]


def _scripts(versions: Mapping[str, Any], issues: Iterable[KnownIssue]) -> Iterator[tuple[KnownIssue, list[Cell]]]:
    """Yield each known issue with a cell per version."""
    for issue in issues:
        cells = []
        for version, found in versions.items():
            showing = found["scripts"].get(issue.id)
            if showing is None:
                cells.append(("quiet", "", "not run"))
                continue
            agrees = (showing["shows"] == "shows") == issue.is_in(found["torch"])
            words = f"torch {version}: {showing['shows']}{': ' + showing['reason'] if showing['reason'] else ''}"
            cells.append(("" if agrees else "bad", _MARKS[showing["shows"]] + ("" if agrees else " !"), words))
        yield issue, cells
