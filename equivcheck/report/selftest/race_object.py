"""A race as JSON values."""

from __future__ import annotations

from typing import Any

from equivcheck.quality.selftest.race.result import Race


def race_object(found: Race) -> dict[str, Any]:
    """One object; seconds are of CPU time."""
    return {
        "mutants": [_mutant(found, name) for name in found.distance.mutants],
        "median_seconds": round(found.median, 3),
        "p90_seconds": round(found.most_of_nine_in_ten, 3),
        "total_seconds": round(found.total, 3),
        "never_caught": list(found.never_caught),
        "campaigns": [
            {
                "seed": each.seed,
                "seconds": round(each.seconds, 3),
                "checks": each.checks,
                "caught": len(each.catches),
                "broken": each.broken or None,
            }
            for each in found.campaigns
        ],
        "budget_seconds": found.distance.seconds,
        "interrupted": found.interrupted,
    }


def _mutant(found: Race, name: str) -> dict[str, Any]:
    catches = found.catches(name)
    return {
        "name": name,
        "caught": len(catches),
        "mean_seconds": round(found.seconds(name), 3),
        "seconds": [round(catch.seconds, 3) for catch in catches],
        "checks": [catch.checks for catch in catches],
    }
