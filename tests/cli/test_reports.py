"""Texts about a campaign."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from equivcheck.campaign.events import KeptFinding, NodeWork, Started, Summary, Ticked
from equivcheck.campaign.findings.example import mark_not_shrunk
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.folder import DEFAULT_STORE
from equivcheck.campaign.findings.store import Kept
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.messages import Control, NodeLost
from equivcheck.checking.kinds import verdict_on
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from equivcheck.report.campaign import progress
from equivcheck.report.campaign.finding_paragraphs import group_findings
from equivcheck.report.campaign.node_text import node_lines
from equivcheck.report.campaign.progress import ProgressLine, progress_text
from equivcheck.report.campaign.summary_details import print_details
from equivcheck.report.campaign.summary_object import summary_object
from equivcheck.report.campaign.summary_text import print_summary
from equivcheck.report.terminal import own_command
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.scenario.scenario import describe_case
from unit.campaign import fakes

PLAN = Plan(seconds=60.0, seed=7)
DIVERGED = fakes.diverged(fakes.scenario(ranks=2, width=3))
EQUIVALENT = Verdict(outcome=Outcome.EQUIVALENT, scenario=fakes.scenario(), world="sim")


@pytest.fixture
def summary() -> Summary:
    """Three checks: one finding, one inconclusive."""
    tally = Tally()
    tally.add(DIVERGED, 0.5)
    tally.add(EQUIVALENT, 0.01)
    tally.add(Verdict(outcome=Outcome.INCONCLUSIVE, scenario=fakes.scenario(), world="sim", reason="noise"), 0.01)
    tally.fingerprints[fingerprint(DIVERGED)] += 1
    path = Path("findings") / fingerprint(DIVERGED)
    finding = KeptFinding(fingerprint=fingerprint(DIVERGED), path=path, verdict=DIVERGED, kept=Kept.NEW)
    return Summary(plan=PLAN, seconds=2.0, tally=tally, findings=(finding,), store=Path("findings"))


def screen(summary: Summary) -> list[str]:
    """Lines of the final screen."""
    out = io.StringIO()
    print_summary(Console(file=out, width=80), summary)
    return out.getvalue().splitlines()


def details(summary: Summary) -> str:
    """Output of `-v` on a narrow terminal."""
    out = io.StringIO()
    print_details(Console(file=out, width=60), summary)
    return out.getvalue()


def finding(verdict: CaseVerdict, kept: Kept = Kept.NEW) -> KeptFinding:
    """A finding in the default store."""
    return KeptFinding(fingerprint=fingerprint(verdict), path=DEFAULT_STORE / fingerprint(verdict), verdict=verdict, kept=kept)


def explained(verdict: Verdict, cause: Cause, *, exact: bool = True) -> Verdict:
    """A finding with a diagnosis."""
    return replace(verdict, diagnosis=Diagnosis(cause=cause, sentence=f"{cause.value} explains it", exact=exact))


def test_the_screen_tells_the_result_in_one_order(summary: Summary) -> None:
    """Findings with cause and command, parallelisms, known issues, the control, and three commands."""
    found = finding(explained(DIVERGED, Cause.SUMMED))
    summary.tally.add(Verdict(outcome=Outcome.KNOWN, scenario=fakes.scenario(), world="sim", known="one"), 0.1)
    control = Control(name="a_bug", wrong="Nothing.", examples=3, caught=True)
    lines = screen(replace(summary, findings=(found,), control=control, store=DEFAULT_STORE))
    starts = (
        "1 finding in trainings:",
        "DIVERGED: ddp on 2 ranks",
        "  why:   summed explains it",
        f"  more:  equivcheck replay {found.fingerprint}",
        "4 checks in 2 s",
        "parallelism",
        "ddp",
        "1 check met 1 known problem of torch; fuzz -v lists it",
        "control: a bug planted on purpose (a_bug) was caught after 3 examples",
        "next:",
    )
    places = [next(number for number, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert sum(" equivcheck " in line for line in lines[places[-1] :]) == 3


@pytest.mark.parametrize("num_causes", [0, 1, 2, 5, 30])
def test_the_screen_has_40_lines_of_80_columns(summary: Summary, num_causes: int) -> None:
    """If there are many causes, paragraphs become shorter, and then they are only counted."""
    for name in layout_names():
        summary.tally.durations[name] = summary.tally.durations["ddp"]
        summary.tally.outcomes[name, Outcome.EQUIVALENT] += 1
    causes = list(Cause)[:num_causes]
    found = tuple(finding(explained(fakes.diverged(DIVERGED.scenario, tensor=cause.value), cause)) for cause in causes)
    lines = screen(replace(summary, findings=found, store=DEFAULT_STORE))
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    told = sum(line.startswith("DIVERGED: ") for line in lines)
    more = sum(int(line.split()[1]) for line in lines if line.startswith("and ") and "more cause" in line)
    assert told + more == num_causes
    assert told >= min(num_causes, 1)


def test_findings_of_one_cause_are_one_paragraph(summary: Summary) -> None:
    """The example is the smallest with an exact cause; all layouts are named."""
    wide, small = fakes.scenario(width=5), fakes.scenario(width=2)
    verdicts = (
        explained(fakes.diverged(small, tensor="bias"), Cause.SUMMED, exact=False),
        explained(fakes.diverged(wide), Cause.SUMMED),
        explained(fakes.diverged(fakes.static_graph(tensor_parallel=True)), Cause.SUMMED),
        explained(fakes.diverged(small), Cause.LOCAL_NORM),
        fakes.diverged(small, tensor="scale"),
        fakes.diverged(wide, tensor="scale"),
    )
    groups = group_findings(map(finding, verdicts))
    assert [len(group.findings) for group in groups] == [3, 1, 2]
    assert groups[0].example.verdict == verdicts[1]
    assert groups[0].layouts == ("ddp", "ddp x tensor_parallel")


def test_what_was_not_shrunk_is_one_paragraph_that_says_so(summary: Summary) -> None:
    """The paragraph claims no cause."""
    verdicts = [mark_not_shrunk(fakes.diverged(fakes.scenario(), tensor=name)) for name in ("one", "two", "three")]
    lines = screen(replace(summary, findings=tuple(map(finding, verdicts))))
    assert sum(line.startswith("DIVERGED") for line in lines) == 1
    assert "  note:  not fully shrunk: the campaign ended first" in lines
    assert not any(line.startswith("  why:") for line in lines)


def test_a_finding_that_is_nowhere_else_is_printed_with_its_case(summary: Summary) -> None:
    """Otherwise the finding would be lost."""
    lines = screen(replace(summary, findings=(finding(DIVERGED, Kept.UNKEPT),), unkept="the disk is full"))
    assert f"  case:  {to_json(DIVERGED.scenario)}" in lines
    assert any("the disk is full" in line for line in lines)


def test_a_composition_counts_in_each_of_its_parallelisms(summary: Summary) -> None:
    """Each parallelism has a line; tensor programs come last."""
    both = Verdict(outcome=Outcome.EQUIVALENT, scenario=fakes.static_graph(tensor_parallel=True), world="sim")
    for verdict in (both, verdict_on(fakes.program(), outcome=Outcome.EQUIVALENT, world="sim")):
        summary.tally.add(verdict, 0.1)
    rows = [line.split() for line in screen(summary)]
    start = next(number for number, row in enumerate(rows) if row[:1] == ["parallelism"])
    assert [row[:2] for row in rows[start + 1 : start + 4]] == [["ddp", "4"], ["tensor_parallel", "1"], ["tensor_program", "1"]]


def test_commands_can_be_copied_under_tox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands have the program's path, because it is not on the reader's PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".tox/try/bin/equivcheck")])
    monkeypatch.setenv("TOX_ENV_NAME", "try")
    assert own_command("replay", "1a") == ".tox/try/bin/equivcheck replay 1a"
    monkeypatch.delenv("TOX_ENV_NAME")
    assert own_command("replay", "1a") == "equivcheck replay 1a"


def test_the_details_say_everything_that_was_counted(summary: Summary) -> None:
    """Outcomes, times, the slowest scenario, reasons, and each finding with an unbroken replay command."""
    text = details(summary)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("ddp")]
    assert row[:5] == ["ddp", "1", "1", "1", "3"]
    assert f"slowest: 500 ms, {describe_case(DIVERGED.scenario)}" in text
    assert "inconclusive: noise, 1 check" in text
    assert f"equivcheck replay findings/{fingerprint(DIVERGED)}" in text
    assert "1.5 checks/s, seed 7" in text


def test_a_campaign_that_never_started_can_be_told_too() -> None:
    """Without checks, there is still a table, and a JSON object without NaN."""
    empty = Summary(plan=PLAN, seconds=0.0, tally=Tally(), findings=(), store=Path("findings"), broken="it broke")
    assert "the checker itself failed: it broke" in screen(empty)
    text = json.dumps(summary_object(empty), allow_nan=False)
    assert json.loads(text)["checks_per_second"] == 0


def test_the_object_has_every_outcome(summary: Summary) -> None:
    """Outcomes that did not occur have a count of 0."""
    found = summary_object(summary)
    expected = {outcome.value: 0 for outcome in Outcome} | {"diverged": 1, "equivalent": 1, "inconclusive": 1}
    assert found["outcomes"] == expected
    assert found["layouts"]["ddp"]["outcomes"] == expected
    assert found["checks"] == 3
    assert found["reasons"] == [{"outcome": "inconclusive", "reason": "noise", "checks": 1}]


def test_what_is_decided_in_part_is_told(summary: Summary) -> None:
    """Equivalent checks with undecided later steps are counted, with the reason."""
    summary.tally.add(replace(EQUIVALENT, undecided="not decided from step 2 on: noise"), 0.1)
    assert "equivalent: not decided from step N on: noise, 1 check" in details(summary)
    assert summary_object(summary)["equivalent_up_to_a_step"] == 1


def test_known_issues_are_told_that_show_and_that_do_not(summary: Summary) -> None:
    """Each issue has its counts, because one that no longer shows may be fixed."""
    known = Verdict(outcome=Outcome.KNOWN, scenario=fakes.scenario(), world="sim", known="one")
    for verdict, told in ((known, ("one",)), (EQUIVALENT, ("one", "other")), (EQUIVALENT, ())):
        summary.tally.add(verdict, 0.1, decided=told, avoided=() if told else ("one",))
    text = details(summary)
    assert "known issue one: in 1 of 2 checks that could show it, avoided in 1 more" in text
    assert "not seen although possible: other (1 check)" in text
    assert summary_object(summary)["known"] == {
        "one": {"checks": 1, "of": 2, "avoided": 1},
        "other": {"checks": 0, "of": 1, "avoided": 0},
    }


def test_progress_is_one_line(summary: Summary) -> None:
    """The line has the remaining time, checks, findings and known issues."""
    event = Ticked(seconds=2.0, tally=summary.tally, num_findings=1)
    assert progress_text(event, PLAN) == "58 s left | 3 checks | 1 finding | 0 known"
    assert progress_text(event, Plan(num_checks=9, seed=7)) == "4 s left | 3/9 checks | 1 finding | 0 known"


def test_progress_says_when_the_time_is_over(summary: Summary) -> None:
    """Checks, shrinking and the control may then still end."""
    event = Ticked(seconds=PLAN.seconds + 1.0, tally=summary.tally, num_findings=1)
    assert progress_text(event, PLAN).startswith("finishing | 3 checks")


def test_progress_fits_in_80_columns(summary: Summary) -> None:
    """A long night fits too; the shown time is the smaller one of both budgets."""
    summary.tally.outcomes["ddp", Outcome.EQUIVALENT] = 1_234_567
    summary.tally.known["one"] = 123_456
    event = Ticked(seconds=30_000.0, tally=summary.tally, num_findings=12)
    line = progress_text(event, Plan(seconds=36_000.0, seed=7))
    assert line == "1:40:00 left | 1,234,569 checks | 12 findings | 123,456 known"
    assert progress_text(event, Plan(seconds=36_000.0, num_checks=1_300_000, seed=7)).startswith("26:30 left")


OTHER_TORCH = "left out: it has torch 2.9.1, this machine 2.13.0"
NODES = (
    NodeWork(name="10.0.0.2", num_workers=4, num_checks=1200, seconds=60.0),
    NodeWork(name="10.0.0.3", num_workers=1, num_checks=30, seconds=12.0, lost="lost: it is unplugged"),
    NodeWork(
        name="10.0.0.4", num_workers=0, num_checks=0, seconds=60.0, lost="left out: it has torch 2.9.1, this machine 2.13.0"
    ),
)


def test_the_end_tells_the_speed_of_each_node(summary: Summary) -> None:
    """A lost node has its speed until then; an unused node has the reason."""
    told = replace(summary, nodes=NODES)
    assert [line for line in details(told).splitlines() if line.startswith("node")] == [
        "node 10.0.0.2: 1,200 checks by 4 workers in 60.0 s, 20.0 checks/s",
        "node 10.0.0.3: 30 checks by 1 worker in 12.0 s, 2.5 checks/s; lost: it is unplugged",
        f"node 10.0.0.4: {OTHER_TORCH}",
    ]
    assert [(node["name"], node["checks_per_second"], node["lost"]) for node in summary_object(told)["nodes"]] == [
        ("10.0.0.2", 20.0, None),
        ("10.0.0.3", 2.5, "lost: it is unplugged"),
        ("10.0.0.4", 0.0, OTHER_TORCH),
    ]
    assert summary_object(summary)["nodes"] == []


def test_progress_has_a_line_for_each_node(summary: Summary) -> None:
    """Unused nodes are named at the start. The reason for a loss appears once."""
    out = io.StringIO()
    with ProgressLine(Console(file=out, width=80, force_terminal=True)) as line:
        line(Started(plan=PLAN, nodes=NODES))
        line(NodeLost(name="10.0.0.3", why="it is unplugged"))
        line(Ticked(seconds=2.0, tally=summary.tally, num_findings=1, nodes=NODES))
    text = out.getvalue()
    assert "comparing generated cases with the single-device run: 1 process on 1 node, seed 7" in text
    assert text.count(f"node 10.0.0.4: {OTHER_TORCH}") == 1
    assert text.count("node 10.0.0.3: lost: it is unplugged") == 1
    assert text.count("node 10.0.0.3: lost") > 1
    assert "node 10.0.0.2: 20.0 checks/s" in text


def test_of_many_nodes_progress_has_the_first_few() -> None:
    """A terminal has room for some nodes only."""
    many = [NodeWork(name=str(number), num_workers=1, num_checks=1, seconds=1.0) for number in range(20)]
    assert list(node_lines(many))[-1] == "and 12 more nodes"
    assert len(list(node_lines(many))) == 9


def test_without_a_terminal_progress_is_a_line_now_and_then(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets few lines, and no cursor movements."""
    out = io.StringIO()
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressLine(Console(file=out)) as line:
        line(Started(plan=PLAN))
        for tick in range(125):
            now = tick / 5
            line(Ticked(seconds=now, tally=summary.tally, num_findings=0))
    assert len(out.getvalue().splitlines()) == 2
    assert "\x1b" not in out.getvalue()
