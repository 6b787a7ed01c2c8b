"""One page of each kind, with everything on it that a page can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from equivcheck.oracle.known_issues.known import all_known_issues
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.doctor import Probe
from equivcheck.quality.versions.corpus import CorpusResult
from equivcheck.quality.versions.matrix import Matrix, VersionResult
from equivcheck.report.matrix.outputs import write_html
from equivcheck.report.run_page.page import write_page as write_run
from equivcheck.report.versions import page as versions
from equivcheck.scenario.file_format.codec import encode
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import LayoutRow
from unit.campaign import fakes
from unit.report.finding_pages import on_a_grid, page_of, under_ddp
from unit.report.pages import campaign, tally
from unit.report.recordings import write_compared


def every_page(folder: Path) -> dict[str, Path]:
    """The pages by name."""
    files = {}
    for name, write in PAGES.items():
        files[name] = folder / f"{name}.html"
        write(files[name])
    return files


def write_versions(file: Path) -> None:
    """Of two versions of torch, with a finding on the second, and scripts that do not do what is on file."""
    issues = all_known_issues()
    corpus = tuple(CorpusResult(outcome=outcome, reason="because") for outcome in (Outcome.EQUIVALENT, Outcome.KNOWN))
    found = {
        version: VersionResult(
            torch=f"{version}+cpu",
            probes=tuple(_probe(world, works=version != "2.9.1") for world in ("sim", "gloo")),
            corpus=corpus,
            scripts={
                issue.id: Showing(shows=shows, reason="no such module") for issue, shows in zip(issues, _shows(), strict=False)
            },
        )
        for version in ("2.9.1", "2.13.0")
    }
    ids = tuple(issue.id for issue in issues)
    matrix = Matrix(code="beef", seed=1, scenarios=(under_ddp(), on_a_grid()), issues=ids, versions=found)
    versions.write_page(file, encode(matrix), issues, {"2.9.1": ["1 diverged: because"], "2.13.0": []}, is_bad=True)


def _shows() -> Iterator[Shows]:
    while True:
        yield from Shows


def _probe(world: str, *, works: bool) -> Probe:
    return Probe(world=world, subject="ddp", works=works, reason="" if works else "no", known="", seconds=1.0)


def write_campaign(file: Path) -> None:
    """A night with a finding."""
    store = file.with_suffix(".store")
    outcomes = (Outcome.EQUIVALENT, Outcome.EQUIVALENT, Outcome.KNOWN, Outcome.INCONCLUSIVE, Outcome.DIVERGED)
    campaign(store, found=(fakes.diverged(fakes.scenario()),), counted=tally(*outcomes))
    write_run(file, store)


def write_matrix(file: Path) -> None:
    """Of one layout, which could not be checked."""
    row = LayoutRow(
        name="ddp", mesh=(("dp", 2),), expected=Outcome.EQUIVALENT, verdict=None, error="RuntimeError: no", milliseconds=3.0
    )
    write_html(file, "recipe.py", MatrixResult(rows=(row,), asked=1))


PAGES: dict[str, Callable[[Path], object]] = {
    "diverged": lambda file: page_of(file, on_a_grid(), "reduce_scatter_missing", why=True, script="import torch"),
    "hung": lambda file: page_of(file, under_ddp(), "rank_skips_reduction", why=True),
    "equivalent": lambda file: page_of(file, under_ddp(steps=3)),
    "campaign": write_campaign,
    "matrix": write_matrix,
    "recorded": lambda file: write_compared(file, "samples"),
    "versions": write_versions,
}
"""What writes each kind of page, by name."""
