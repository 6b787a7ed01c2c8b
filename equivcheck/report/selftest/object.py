"""A selftest as JSON values."""

from __future__ import annotations

import json
from typing import Any

from equivcheck.quality.selftest.row import Row, Selftest, Shrunk
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import to_json


def selftest_object(found: Selftest) -> dict[str, Any]:
    """One object; rates are shares from 0 to 1."""
    return {
        "mutants": [_row(row) for row in found.rows],
        "kill_rate": round(found.kill_rate, 4),
        "reached_rate": round(found.reached_rate, 4),
        "diagnosis_rate": round(found.diagnosis_rate, 4),
        "caught_rate": round(found.caught_rate, 4),
        "median_examples": found.median_examples,
        "worst_examples": found.worst_examples,
        "small": found.num_small,
        "asked": found.asked,
        "examined": len(found.rows),
        "reached": found.num_reached,
        "killed": found.num_killed,
        "seed": found.seed,
        "seconds": round(found.seconds, 3),
        "interrupted": found.interrupted,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "family": row.family.value,
        "drawn": row.drawn,
        "reachable": row.reachable,
        "caught": row.caught,
        "undecided": row.undecided,
        "survived": row.survived,
        "layouts": {
            each.name: {"reachable": each.reachable, "caught": each.caught, "undecided": each.undecided} for each in row.layouts
        },
        "examples": row.examples or None,
        "seconds": round(row.seconds, 3),
        "survivor": None if row.survivor is None else _scenario(row.survivor),
        "shrunk": None if row.shrunk is None else _shrunk(row.shrunk),
        "diagnosis_expected": row.expected[0].value,
        "diagnosis_accepted": [cause.value for cause in row.expected],
        "diagnosis_given": None if row.given is None else row.given.cause.value,
        "diagnosis_sentence": None if row.given is None else row.given.sentence,
        "diagnosis_right": row.is_explained,
        "broken": row.broken or None,
    }


def _shrunk(shrunk: Shrunk) -> dict[str, Any]:
    least = shrunk.minimum
    return {
        "ranks": shrunk.ranks,
        "layers": shrunk.layers,
        "widths": list(shrunk.widths),
        "steps": shrunk.steps,
        "options": list(shrunk.options),
        "outcome": shrunk.outcome.value,
        "repr": repr(shrunk.scenario),
        "scenario": _scenario(shrunk.scenario),
        "minimum": {"ranks": least.ranks, "layers": least.layers, "steps": least.steps, "because": least.because},
        "small": shrunk.is_small,
        "seconds": round(shrunk.seconds, 3),
        "checks": shrunk.checks,
    }


def _scenario(scenario: Scenario) -> Any:
    return json.loads(to_json(scenario))
