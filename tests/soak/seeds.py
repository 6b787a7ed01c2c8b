"""Fixed scenarios with many seeds: how far from a false alarm is each? `python tests/soak/seeds.py --scenarios 40 --seeds 100`.

A seed decides the parameters and the data. Prints one JSON object: of each scenario its outcomes, and the largest errors of what
is equivalent in units of the tolerance; and the same of all, by layout and by optimizer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from equivcheck import Outcome, check
from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.campaign.selection.novelty import expected_cost
from equivcheck.campaign.tally import Histogram
from equivcheck.scenario import Scenario
from equivcheck.scenario.scenario import describe_case
from equivcheck.strategies import scenarios

SHARES = {"median": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
MOST_COST = 25.0
"""Of a scenario (`expected_cost`): what is cheap can have more seeds."""


@dataclass(slots=True)
class Errors:
    """What came of some checks."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Histogram = field(default_factory=Histogram)

    def add(self, outcome: Outcome, error: float) -> None:
        """Count a check."""
        self.outcomes[outcome.value] += 1
        if outcome is Outcome.EQUIVALENT:
            self.errors.add(error)

    def report(self) -> dict[str, Any]:
        """What they come to."""
        quantiles = {name: float(f"{self.errors.quantile(share):.3g}") for name, share in SHARES.items()}
        return {"outcomes": dict(self.outcomes)} | (quantiles if self.errors.count else {})


def drawn(number: int, seed: int, layouts: tuple[str, ...], optimizer: str) -> list[Scenario]:
    """As many different scenarios of several ranks and steps, none of them costly; of any optimizer for an empty name."""
    found: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if len(found) >= number:
            raise EndBatch
        is_plain = scenario.layout.mesh.num_ranks == 1 or scenario.training.steps == 1
        is_meant = optimizer in ("", type(scenario.training.optimizer).__name__)
        if is_meant and not is_plain and expected_cost(scenario) <= MOST_COST and scenario not in found:
            found.append(scenario)

    strategy = scenarios(layouts=layouts or None)
    for batch in itertools.count():
        run_batch(strategy, batch_seed(seed, batch), take)
        if len(found) >= number:
            break
    return found


def with_seeds(scenario: Scenario, number: int) -> Iterator[Scenario]:
    """The same scenario with other parameters and data."""
    for seed in range(number):
        yield replace(scenario, training=replace(scenario.training, seed=seed))


def measured(chosen: list[Scenario], num_seeds: int) -> dict[str, Any]:
    """Check each scenario with each seed."""
    everything, by_name, rows = Errors(), dict[str, Errors](), []
    for place, scenario in enumerate(chosen, start=1):
        print(f"{place} of {len(chosen)}: {describe_case(scenario)}", file=sys.stderr, flush=True)
        own = Errors()
        names = (scenario.layout.name, type(scenario.training.optimizer).__name__)
        for seeded in with_seeds(scenario, num_seeds):
            verdict = check(seeded)
            for errors in (own, everything, *(by_name.setdefault(name, Errors()) for name in names)):
                errors.add(verdict.outcome, verdict.worst_error)
        rows.append({"scenario": describe_case(scenario)} | own.report())
    return {
        "all": everything.report(),
        "names": {name: errors.report() for name, errors in sorted(by_name.items())},
        "scenarios": rows,
    }


def main() -> None:
    """Read the command line; exit code 1 if any check is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=40, help="how many scenarios")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds each has")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios")
    parser.add_argument("--layout", action="append", default=[], help="only scenarios of this layout; may be repeated")
    parser.add_argument("--optimizer", default="", help="only scenarios of this optimizer, as Muon")
    given = parser.parse_args()
    chosen = drawn(given.scenarios, given.seed, tuple(given.layout), given.optimizer)
    result = measured(chosen, given.seeds)
    print(json.dumps(result, indent=1))
    sys.exit(any(result["all"]["outcomes"].get(outcome.value) for outcome in Outcome if outcome.is_finding))


if __name__ == "__main__":
    main()
