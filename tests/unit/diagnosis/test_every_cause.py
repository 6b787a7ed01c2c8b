"""Each cause is diagnosed for its planted fault, and not without it."""

import pytest

from equivcheck import Outcome, check
from equivcheck.diagnosis.explain import explained
from equivcheck.oracle.verdict.cause import Cause
from support.supported import require_mended, require_supported
from unit.diagnosis import causes, token_causes
from unit.diagnosis.causes import Example

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = (*causes.EXAMPLES, *token_causes.EXAMPLES)
ELSEWHERE = {Cause.READ_BY_TORCH, Cause.NOT_RESTORED, Cause.AVERAGE_OF_WEIGHTS, Cause.NOT_FROZEN, Cause.FORWARD_REPEATED}
"""Tested in `tests/equivalence/test_full_tensor.py`, `tests/unit/user/test_restart.py` and `tests/unit/user/diagnosis`."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.cause.value)
def test_a_planted_fault_is_named(example: Example) -> None:
    """Cause and sentence follow from the ranks' values only."""
    require_supported(example.scenario)
    verdict = explained(check(example.scenario, alter=example.plant), alter=example.plant)

    assert verdict.outcome.is_finding, verdict.describe()
    assert verdict.diagnosis is not None, verdict.describe()
    assert (verdict.diagnosis.cause, verdict.diagnosis.exact) == (example.cause, example.exact), verdict.diagnosis.sentence
    assert example.words in verdict.diagnosis.sentence


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.cause.value)
def test_the_same_scenario_without_the_fault_is_not_diagnosed(example: Example) -> None:
    """Correct ranks are not diagnosed."""
    verdict = check(example.scenario)
    require_mended(verdict)

    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert explained(verdict).diagnosis is None


def test_every_cause_has_an_example() -> None:
    """A new cause needs a scenario that shows it."""
    assert {example.cause for example in EXAMPLES} == set(Cause) - ELSEWHERE
