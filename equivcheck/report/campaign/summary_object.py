"""A campaign's summary as JSON values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from equivcheck.campaign.events import KeptFinding, Summary
from equivcheck.campaign.findings.example import is_shrunk
from equivcheck.campaign.findings.finding import verdict_object
from equivcheck.campaign.findings.store import Kept
from equivcheck.campaign.tally import Histogram, Tally
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.campaign.node_text import node_object
from equivcheck.report.coverage_text import programs_object, reach_object
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.file_format.codec import encode, to_json
from equivcheck.scenario.scenario import describe_case


def summary_object(summary: Summary) -> dict[str, Any]:
    """Convert a campaign's summary to a JSON object. It has a count for each outcome, also for those with no checks."""
    tally, plan, control = summary.tally, summary.plan, summary.control
    return {
        "checks": tally.num_checks,
        "seconds": round(summary.seconds, 3),
        "checks_per_second": round(tally.num_checks / summary.seconds, 3) if summary.seconds else 0.0,
        "not_repeated": tally.not_repeated,
        "shrinking_checks": tally.num_shrinking,
        "outcomes": {outcome.value: _num(tally, outcome) for outcome in Outcome},
        "equivalent_up_to_a_step": tally.num_undecided,
        "layouts": {layout: _layout(tally, layout) for layout in sorted(tally.durations)},
        "beyond_limits": {
            "checks": tally.beyond.total(),
            "outcomes": {outcome.value: tally.beyond[outcome] for outcome in Outcome},
        },
        "errors": {
            "all": _errors(tally.errors_of()),
            "sizes": [[round_to_3_digits(middle), number] for middle, number in tally.errors_of().buckets],
            "layouts": {layout: _errors(tally.errors_of(layout)) for layout in sorted({names[0] for names in tally.errors})},
            "optimizers": {
                name: _errors(tally.errors_of(name)) for name in sorted({name for names in tally.errors for name in names[1:]})
            },
        },
        "known": {issue: _known(tally, issue) for issue in sorted({*tally.decided, *tally.avoided})},
        "reasons": [
            {"outcome": outcome.value, "reason": reason, "checks": number}
            for (outcome, reason), number in tally.reasons.most_common()
        ],
        "pairs": reach_object(tally.reach),
        "signatures": len(tally.signatures),
        "programs": programs_object(tally.programs),
        "slowest": _of_case("seconds", round(tally.slowest_seconds, 4), tally.slowest),
        "nearest": _of_case("error", round_to_3_digits(tally.nearest_error), tally.nearest),
        "findings": [finding_object(finding, tally) for finding in summary.findings],
        "control": None if control is None else encode(replace(control, seconds=round(control.seconds, 3))),
        "cut_off": summary.num_cut_off,
        "nodes": [node_object(node) for node in summary.nodes],
        "store": str(summary.store),
        "seed": plan.seed,
        "world": plan.world,
        "workers": plan.num_workers,
        "budget_seconds": None if plan.seconds == math.inf else plan.seconds,
        "budget_checks": plan.num_checks,
        "interrupted": summary.interrupted,
        "broken": summary.broken or None,
        "unkept": summary.unkept or None,
    }


def finding_object(finding: KeptFinding, tally: Tally) -> dict[str, Any]:
    """Convert a campaign's finding to a JSON object."""
    verdict = finding.verdict
    return {
        "fingerprint": finding.fingerprint,
        "outcome": verdict.outcome.value,
        "layout": verdict.case.summary_row[0],
        "ranks": verdict.case.num_ranks,
        "reason": verdict.reason,
        "cause": None if verdict.diagnosis is None else verdict.diagnosis.cause.value,
        "why": None if verdict.diagnosis is None else verdict.diagnosis.sentence,
        "shrunk": is_shrunk(verdict),
        "beyond": verdict.beyond or None,
        "path": None if finding.kept is Kept.UNKEPT else str(finding.path),
        "kept": finding.kept.value,
        "verdict": verdict_object(verdict) if finding.kept is Kept.UNKEPT else None,
        "checks": tally.fingerprints[finding.fingerprint],
    }


def _num(tally: Tally, outcome: Outcome) -> int:
    return sum(number for (_, other), number in tally.outcomes.items() if other is outcome)


def _known(tally: Tally, issue: str) -> dict[str, int]:
    """Return how many checks showed an issue, how many could have shown it, and how many were changed to avoid it."""
    return {"checks": tally.known[issue], "of": tally.decided[issue], "avoided": tally.avoided[issue]}


def _layout(tally: Tally, layout: str) -> dict[str, Any]:
    return {
        "checks": sum(number for (name, _), number in tally.outcomes.items() if name == layout),
        "outcomes": {outcome.value: tally.outcomes[layout, outcome] for outcome in Outcome},
        "median_ms": milliseconds(tally.durations[layout].quantile(0.5)),
        "p95_ms": milliseconds(tally.durations[layout].quantile(0.95)),
    }


def _errors(errors: Histogram) -> dict[str, float | None]:
    """Quantiles of the errors in equivalent checks, relative to tolerance."""
    shares = {"median": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
    return {"checks": errors.count} | {name: round_to_3_digits(errors.quantile(share)) for name, share in shares.items()}


def round_to_3_digits(number: float) -> float | None:
    """Round a number to three significant digits. None if it is NaN."""
    return None if math.isnan(number) else float(f"{number:.3g}")


def _of_case(figure: str, number: float | None, case: Checkable | None) -> dict[str, Any] | None:
    """Convert a figure with its case to a JSON object; None if there is no case."""
    return None if case is None else {figure: number, "words": describe_case(case), "scenario": json.loads(to_json(case))}


def milliseconds(seconds: float) -> float | None:
    """Convert seconds to rounded milliseconds. None if they are NaN."""
    return None if math.isnan(seconds) else round(seconds * 1000, 2)
