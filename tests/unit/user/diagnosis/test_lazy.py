"""A diagnosis runs when a verdict is read, once, and as if it had run in the check."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from equivcheck import Outcome, check_training
from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user import diagnosing
from equivcheck.user.diagnosing import OTHER_VALUES, KeptValues, diagnosis_of
from unit.user.diagnosis.wrong_gradients import GRADIENTS
from unit.user.diagnosis.wrong_trainings import nothing, step_of
from unit.user.programs import batches, brought


@pytest.fixture
def diagnoses(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Arguments of every diagnosis that ran."""
    ran: list[object] = []

    def counted(*arguments: Any) -> Any:
        ran.append(arguments)
        return diagnosis_of(*arguments)

    monkeypatch.setattr(diagnosing, "diagnosis_of", counted)
    return ran


def unreduced(**changes: Any) -> dict[str, Any]:
    """A training without its reduction."""
    return brought(parallelize=lambda model, _mesh: model, rank_step=step_of(reduce=nothing), **changes)


def test_a_diagnosis_runs_at_the_first_read_only(diagnoses: list[object]) -> None:
    """Outcome, divergence, repr, equality and hash need no diagnosis; the second read repeats none."""
    verdict = check_training(**unreduced())
    assert (verdict.outcome, verdict == copy.deepcopy(verdict)) == (Outcome.DIVERGED, True)
    before = (repr(verdict), hash(verdict))
    with pytest.raises(NotEquivalent) as raised:
        verdict.assert_equivalent()
    assert not diagnoses
    assert "left unreduced over the 2 dp ranks" in str(raised.value)
    assert (verdict.kinds, verdict.hint) == ((Cause.NOT_REDUCED,), "")
    assert str(raised.value) == verdict.describe() == copy.deepcopy(verdict).describe()
    assert (repr(verdict), hash(verdict)) == before
    assert len(diagnoses) == 1


def test_hypothesis_explains_only_what_it_prints(diagnoses: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many examples fail while Hypothesis shrinks. It prints the smallest, after a last run of it."""
    monkeypatch.setattr(diagnosing, "MOST_BYTES", 0)
    failing: list[int] = []

    @settings(max_examples=20, database=None, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
    @given(rows=st.integers(1, 6), steps=st.integers(1, 3), factor=st.sampled_from([1, 2, 3]))
    def check(rows: int, steps: int, factor: int) -> None:
        verdict = check_training(**unreduced(batches=batches(2 * rows, steps)) | {"seed": factor})
        failing.append(rows)
        verdict.assert_equivalent()

    with pytest.raises(NotEquivalent, match="left unreduced over the 2 dp ranks"):
        check()
    assert len(failing) > 4, "several examples fail"
    assert len(diagnoses) == 1


def test_hundreds_of_verdicts_keep_the_values_of_few(diagnoses: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Older verdicts check again when they are read, and say the same."""
    gc.collect()
    before = {id(found) for found in gc.get_objects() if isinstance(found, KeptValues)}
    first = check_training(**unreduced())
    (kept,) = [found for found in gc.get_objects() if isinstance(found, KeptValues) and id(found) not in before]
    assert kept.values is not None
    monkeypatch.setattr(diagnosing, "MOST_BYTES", 2 * kept.values.num_bytes)
    others = [check_training(**unreduced(seed=seed)) for seed in (1, 2)]
    holders = [found for found in gc.get_objects() if isinstance(found, KeptValues) and id(found) not in before]
    assert [found.values is not None for found in holders] == [False, True, True]
    assert first.kinds == others[0].kinds == (Cause.NOT_REDUCED,)
    assert len(diagnoses) == 2


def test_values_are_freed_with_their_verdict_or_its_diagnosis() -> None:
    """Nothing else refers to them."""
    gc.collect()
    before = sum(isinstance(found, KeptValues) for found in gc.get_objects())
    verdict = check_training(**unreduced())
    assert verdict.cause
    gc.collect()
    assert sum(isinstance(found, KeptValues) for found in gc.get_objects()) == before


def test_a_training_that_changes_from_run_to_run_has_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second check with other values explains nothing."""
    faulty = [True]
    reduces = step_of()

    def step(*arguments: Any) -> Any:
        return (step_of(reduce=nothing) if faulty[0] else reduces)(*arguments)

    monkeypatch.setattr(diagnosing, "MOST_BYTES", 0)
    verdict = check_training(**unreduced() | {"rank_step": step})
    check_training(**unreduced())
    faulty[0] = False
    assert (verdict.cause, verdict.unfinished) == ("", OTHER_VALUES)
    assert verdict.outcome is Outcome.DIVERGED


def test_later_changes_do_not_matter() -> None:
    """Batches, a model and torch's state may change between the check and the diagnosis. They have their new values after it."""
    model, rows = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), batches()
    verdict = check_training(**unreduced(model=model, batches=rows, dtype=None))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for batch in rows for each in batch)):
            tensor.fill_(7.0)
    torch.set_default_dtype(torch.float16)
    torch.manual_seed(5)
    drawn = torch.random.get_rng_state()
    try:
        assert verdict.kinds == (Cause.NOT_REDUCED,), verdict.describe()
        assert torch.get_default_dtype() is torch.float16
        assert torch.equal(torch.random.get_rng_state(), drawn)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_pickled_verdict_has_its_diagnosis(diagnoses: list[object]) -> None:
    """The training stays behind, although its functions cannot be pickled."""
    verdict = check_training(**unreduced())
    received = pickle.loads(pickle.dumps(verdict))
    assert received == verdict
    assert received.describe() == verdict.describe()
    assert len(diagnoses) == 1


def test_an_interrupted_diagnosis_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the verdict as it was."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    verdict = check_training(**GRADIENTS["not_reduced"].brought)
    with monkeypatch.context() as patch:
        patch.setattr(diagnosing, "diagnosis_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verdict.describe()
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.kinds == (Cause.NOT_REDUCED,)
