"""The same scenarios on every version of torch: drawn here, checked by the other interpreter."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import decode, encode, from_json, to_json
from equivcheck.verdict.verdict import Outcome
from equivcheck.versions.environments import Installation
from equivcheck.versions.process import Ran, run_python

_DEADLINE = 60.0
"""Limit for one run of the ranks, in seconds."""
_START_SECONDS, _SECONDS_EACH = 120.0, 60.0
"""Limit for a process: to start, and for each scenario."""
_MOST_ENDS = 3
"""Processes that end before their time after which nothing more is tried."""
_RUN = "from equivcheck.versions.corpus import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check of a scenario found on a version of torch."""

    outcome: Outcome
    """The verdict's."""
    known: str = ""
    """The known issue that it shows."""
    reason: str = ""
    """One sentence, empty when equivalent."""


def drawn(count: int, seed: int) -> tuple[Scenario, ...]:
    """So many different scenarios, none compiled, as the seed decides; what the torch here cannot run is not among them."""
    from equivcheck.strategies import scenarios
    from equivcheck.strategies.scenario import MORE_RESUMES

    found: dict[Scenario, None] = {}

    def take(scenario: Scenario) -> None:
        if len(found) >= count:
            raise EndBatch
        found[scenario] = None

    number = 0
    while len(found) < count:
        run_batch(scenarios(resumes=MORE_RESUMES), batch_seed(seed, number), take)
        number += 1
    return tuple(found)


def checked(installation: Installation, scenarios: tuple[Scenario, ...]) -> tuple[Checked, ...]:
    """What each scenario gives in sim; one that ends the process, or takes too long, counts as crashed or hung."""
    with tempfile.TemporaryDirectory(prefix="equivcheck-") as folder:
        corpus, results = Path(folder, "corpus.jsonl"), Path(folder, "results.jsonl")
        corpus.write_text("".join(f"{to_json(scenario)}\n" for scenario in scenarios), encoding="utf-8")
        results.touch()
        for _ in range(_MOST_ENDS):
            left = len(scenarios) - _num_lines(results)
            if not left:
                break
            ran = run_python(
                installation.python,
                ("-W", "ignore", "-c", _RUN, str(corpus), str(results)),
                seconds=_START_SECONDS + _SECONDS_EACH * left,
            )
            if _num_lines(results) < len(scenarios):
                _write(results, _ended(ran))
        while _num_lines(results) < len(scenarios):
            _write(results, Checked(outcome=Outcome.CRASHED, reason=f"not run: the process ended {_MOST_ENDS} times before"))
        lines = results.read_text("utf-8").splitlines()
    return tuple(decode(Checked, json.loads(line), where="corpus") for line in lines)


def main() -> None:
    """By the other interpreter: check the scenarios of a file that have no result in another yet."""
    from equivcheck.oracle.check import check

    corpus, results = map(Path, sys.argv[1:])
    for line in corpus.read_text("utf-8").splitlines()[_num_lines(results) :]:
        scenario = from_json(line)
        try:
            verdict = check(scenario, deadline=_DEADLINE)
        except Exception as error:  # of the checker itself: a line of the table, and the next scenario
            _write(results, Checked(outcome=Outcome.CRASHED, reason=f"the checker raised {type(error).__name__}: {error}"))
        else:
            _write(results, Checked(outcome=verdict.outcome, known=verdict.known, reason=verdict.reason))


def _ended(ran: Ran) -> Checked:
    """What is noted for the scenario in which a process ended."""
    if ran.code is None:
        return Checked(outcome=Outcome.HUNG, reason="the process was not done in time")
    return Checked(outcome=Outcome.CRASHED, reason=f"the process ended with exit code {ran.code}: {ran.last_line}")


def _num_lines(file: Path) -> int:
    return file.read_text("utf-8").count("\n")


def _write(file: Path, result: Checked) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(encode(result)) + "\n")
