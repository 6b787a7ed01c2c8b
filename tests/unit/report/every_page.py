"""One page of each kind, with everything on it that a page can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.findings.environment import environment
from equivcheck.campaign.plan import Plan
from equivcheck.checking.dry_run.run import dry_run as run_dry
from equivcheck.mutants.registry import mutants
from equivcheck.oracle.known_issues.known import issues_on_file
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.cause import Diagnosis
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.bench import Row as BenchRow
from equivcheck.quality.bench import row_object
from equivcheck.quality.doctor import Probe
from equivcheck.quality.selftest.row import Row, Selftest
from equivcheck.quality.versions.corpus import Checked
from equivcheck.quality.versions.matrix import Matrix, OfVersion
from equivcheck.report.coverage_text import Measured
from equivcheck.report.matrix.page import write_html
from equivcheck.report.pages import bench, coverage, dry_run, selftest, versions
from equivcheck.report.run_page.page import write_page as write_run
from equivcheck.scenario.file_format.codec import encode
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import Row as LayoutRow
from unit.campaign import fakes
from unit.report.finding_pages import on_a_grid, page_of, under_ddp
from unit.report.pages import campaign, tally

CAUGHT_AFTER = 3
"""Examples that it took, of mutants that were caught."""


def every_page(folder: Path) -> dict[str, Path]:
    """The pages by name."""
    files = {}
    for name, write in PAGES.items():
        files[name] = folder / f"{name}.html"
        write(files[name])
    return files


def write_selftest(file: Path) -> Selftest:
    """Of all mutants, the first of which was never reached, and the second not always caught."""
    chosen = tuple(mutants().values())
    rows = [_row(number, Row.of(mutant), mutant.layouts) for number, mutant in enumerate(chosen)]
    found = Selftest(rows=tuple(rows), asked=len(rows), seed=0, seconds=100.0)
    selftest.write_page(file, found, chosen)
    return found


def _row(number: int, row: Row, layouts: tuple[str, ...]) -> Row:
    if not number:
        return replace(row, drawn=200, seconds=9.0)
    for at, layout in enumerate(layouts[:3]):
        row = row.with_scenario(layout, caught=int(number > 1 or at > 0), undecided=0)
    given = Diagnosis(cause=row.expected[0], sentence="because", exact=True)
    return replace(row, drawn=9, reachable=3, caught=3, examples=CAUGHT_AFTER, seconds=number / 10, given=given)


def write_coverage(file: Path) -> Measured:
    """Of two scenarios."""
    reach = Reach()
    for scenario in (under_ddp(), on_a_grid()):
        reach.add(scenario)
    measured = Measured(reach=reach, plan=Plan(seconds=1.0, seed=3), seconds=1.0)
    coverage.write_page(file, measured)
    return measured


def write_dry_run(file: Path) -> None:
    """With a problem that is none."""
    found = run_dry(on_a_grid())
    dry_run.write_page(file, replace(found, problems=("rank 0 holds [3, 6] of layers.0.linear.weight, expected [2, 6]",)))


def write_bench(file: Path) -> None:
    """Of two layouts, one of which did not run on new processes."""
    rows = [
        BenchRow(layout="ddp", ranks=2, scenarios=20, sim_ms=11.5, gloo_ms=40.0, spawn_ms=6300.0, ranks_only_ms=4.0),
        BenchRow(layout="fsdp2", ranks=4, scenarios=20, sim_ms=37.0, gloo_ms=150.0, spawn_ms=None, ranks_only_ms=None),
    ]
    bench.write_page(file, {"rows": [row_object(row) for row in rows], "training": "fixed", "environment": encode(environment())})


def write_versions(file: Path) -> None:
    """Of two versions of torch, with a finding on the second, and scripts that do not do what is on file."""
    issues = issues_on_file()
    corpus = tuple(Checked(outcome=outcome, reason="because") for outcome in (Outcome.EQUIVALENT, Outcome.KNOWN))
    found = {
        version: OfVersion(
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
    "selftest": write_selftest,
    "coverage": write_coverage,
    "dry_run": write_dry_run,
    "bench": write_bench,
    "versions": write_versions,
}
"""What writes each kind of page, by name."""
