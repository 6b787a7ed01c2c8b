"""Scenarios beyond torch's limits must be right, or be refused by every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.campaign.findings.environment import environment
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.readme import readme
from equivcheck.campaign.tally import Tally
from equivcheck.checking.beyond import check_beyond, judged_beyond
from equivcheck.cli import main
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.report.campaign.summary_details import _beyond_text
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from unit.campaign import fakes
from unit.campaign.test_frontier_batches import beyond_a_limit

LIMIT = "torch has no such thing"
RAISED, WAITING, ENDED = RankState.RAISED, RankState.WAITING, RankState.FINISHED


def crashed(*states: RankState) -> Verdict:
    """A verdict on ranks that ended in the given states."""
    reports = tuple(RankReport(rank=rank, state=state, error="no") for rank, state in enumerate(states))
    failure = Failure(kind=FailureKind.RAISED, summary="rank 0 raised", reports=reports)
    return Verdict(outcome=Outcome.CRASHED, scenario=fakes.scenario(), world="sim", reason="rank 0 raised", failure=failure)


def test_what_every_rank_raises_on_is_unsupported() -> None:
    """The reason names the limit."""
    verdict = judged_beyond(crashed(RAISED, RAISED), LIMIT)
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSUPPORTED, f"{LIMIT}; every rank raises")


@pytest.mark.parametrize("states", [(RAISED, WAITING), (RAISED, ENDED)])
def test_what_some_ranks_raise_on_is_a_finding(states: tuple[RankState, ...]) -> None:
    """The other ranks would wait forever, or go on without them."""
    verdict = judged_beyond(crashed(*states), LIMIT)
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.reason.startswith(f"a run beyond a limit of torch ({LIMIT}) must be correct or fail on every rank, but")


def test_what_is_silently_wrong_is_a_finding_of_its_own() -> None:
    """It is stored separately from the same fault within limits, whose fingerprint stays unchanged."""
    within = fakes.diverged(fakes.scenario())
    verdict = judged_beyond(within, LIMIT)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.reason.endswith(within.reason)
    assert fingerprint(verdict) != fingerprint(within)


@pytest.mark.torch(">=2.12", "earlier versions have no such limit")
def test_scenarios_are_run_beyond_a_limit() -> None:
    """A scenario that every rank refuses is unsupported. A scenario within all limits is checked as usual."""
    refused, within = check_beyond(beyond_a_limit()), check_beyond(fakes.scenario())
    assert refused.outcome is Outcome.UNSUPPORTED
    assert refused.reason.endswith("every rank raises")
    assert (within.outcome, within.beyond) == (Outcome.EQUIVALENT, "")


def test_a_finding_says_how_to_run_it_again() -> None:
    """Without the option, `check` would refuse the scenario."""
    within = fakes.diverged(fakes.scenario())
    command = "equivcheck check scenario.json --world sim"
    assert f"{command}\n" in readme("0123456789ab", within, environment())
    assert f"{command} --beyond\n" in readme("0123456789ab", judged_beyond(within, LIMIT), environment())


@pytest.mark.torch(">=2.12", "earlier versions have no such limit")
@pytest.mark.parametrize(("options", "reason"), [((), "takes absolute values"), (("--beyond",), "every rank raises")])
def test_check_runs_beyond_limits_when_asked_to(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    """Without the option, the verdict names the limit."""
    (tmp_path / "scenario.json").write_text(to_json(beyond_a_limit()), "utf-8")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "scenario.json"), *options])
    assert "UNSUPPORTED" in result.stdout
    assert reason in result.stdout


def test_the_summary_tells_them_apart() -> None:
    """One line counts these scenarios, and no other figure includes them."""
    tally = Tally()
    for outcome in (Outcome.EQUIVALENT, Outcome.UNSUPPORTED, Outcome.UNSUPPORTED):
        tally.add(replace(crashed(RAISED), outcome=outcome, beyond=LIMIT), 1.0)
    assert _beyond_text(tally) == "beyond limits of torch: 3 checks: 1 equivalent, 2 unsupported (every rank raises)"
    assert (tally.num_checks, tally.durations) == (0, {})
