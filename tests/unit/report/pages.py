"""Campaigns as stores have them, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equivcheck.campaign.events import KeptFinding, Summary, Ticked
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.run import Run
from equivcheck.campaign.history.writer import HistoryWriter
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.messages import Control
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.report.campaign.summary_object import summary_object
from equivcheck.report.run_page.page import write_page
from unit.campaign import fakes
from unit.campaign.history.runs import run
from unit.report.html_page import HtmlPage

CONTROL = Control(name="gradients_summed", wrong="Gradients are summed.", examples=3, caught=True)


def tally(*outcomes: Outcome) -> Tally:
    """A check of half a second for each outcome."""
    counted = Tally()
    for outcome in outcomes:
        known = "ddp_static_graph_no_sync" if outcome is Outcome.KNOWN else ""
        verdict = Verdict(
            outcome=outcome, scenario=fakes.scenario(), world="sim", known=known, reason="because", worst_error=0.03
        )
        counted.add(verdict, 0.5, decided=[known] if known else ())
    return counted


def campaign(
    store: Path,
    which: int | Run = 0,
    *,
    found: Sequence[Verdict] = (),
    counted: Tally | None = None,
    killed: bool = False,
    **fields: Any,
) -> Run:
    """The run of one night, or another run: it went on for a minute and found so much, or was killed after half of that."""
    counted = counted or tally(Outcome.EQUIVALENT)
    kept_in = FindingStore(store)
    entered = which if isinstance(which, Run) else replace(run(which), id=f"{which:016x}")
    writer = HistoryWriter(kept_in, entered)
    writer(Ticked(seconds=30.0, tally=counted, num_findings=len(found)))
    findings = [
        KeptFinding(fingerprint=mark, path=kept_in.folder(mark), verdict=each, kept=kept_in.keep(each))
        for each, mark in ((each, fingerprint(each)) for each in found)
    ]
    for finding in findings:
        writer(finding)
    if not killed:
        plan = Plan(seed=entered.seed or 0, seconds=60.0, num_workers=2)
        usual = {"plan": plan, "seconds": 60.0, "tally": counted, "findings": tuple(findings), "store": store, "control": CONTROL}
        summary = Summary(**usual | fields)
        writer(summary)
        writer.summarized(summary_object(summary))
    assert not writer.failed
    return entered


class Page(HtmlPage):
    """The page of a run, or of the last one."""

    def __init__(self, store: Path, name: str = "") -> None:
        file = store / "page.html"
        write_page(file, store, name)
        super().__init__(file.read_text("utf-8"))
