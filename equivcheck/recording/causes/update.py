"""One optimizer update in two recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate, fit, make_candidate
from equivcheck.recording.causes.evidence import Evidence, Sums, Tensors, linear_combination
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.trace import Moment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """The parameters before an update in the second run (run B), and the correct update from the first run (run A)."""

    evidence: Evidence
    """Both runs, and their first difference."""
    before: Tensors
    """Run B's parameters before the update."""
    moved: Tensors
    """The change of run A's parameters by the update."""
    earlier: Tensors
    """The change of run A's parameters by the update one step before. Empty in the first recorded step."""

    def candidate(self, cause: Cause, words: str, moves: Sequence[Tensors], *, size: float = 1.0, fitted: int = 0) -> Candidate:
        """Return a candidate for the mistake `cause`. `words`, `size` and `fitted` are passed to `make_candidate`.

        Its errors are distances between run B's parameters and predicted parameters. Each item in `moves` is a possible update,
        and gives one prediction. For each tensor, only the prediction with the smallest error counts.
        """
        evidence = self.evidence
        candidates = [
            make_candidate(evidence, cause, words, linear_combination((1.0, self.before), (1.0, each)), size=size, fitted=fitted)
            for each in moves
        ]
        errors = {name: min(each.errors[name] for each in candidates) for name in candidates[0].errors}
        return Candidate(cause=cause, words=words, errors=errors, size=size, fitted=fitted)

    def fit(self, columns: Sequence[Tensors]) -> Sums | None:
        """Fit a linear combination of `columns` to run B's update, and return its coefficients.

        Only wrong tensors count. Returns None if the coefficients are not unique.
        """
        own = linear_combination((1.0, self.evidence.found_sums), (-1.0, self.before))
        return fit(self.evidence, columns, own)


def update_of(evidence: Evidence) -> Update | None:
    """Return the update in the step with the first difference; None if the parameters before it were not recorded."""
    one, other = (_parameters_before(run, evidence.step, evidence) for run in (evidence.first, evidence.second))
    if not one or not other:
        return None
    moved = linear_combination((1.0, evidence.expected_sums), (-1.0, one))
    before = _parameters_before(evidence.first, evidence.step - 1, evidence)
    earlier = linear_combination((1.0, one), (-1.0, before)) if before else {}
    return Update(evidence=evidence, before=other, moved=moved, earlier=earlier)


def _parameters_before(run: RecordedRun, step: int, evidence: Evidence) -> Tensors:
    return evidence.sums(run, step - 1, Moment.UPDATE) or evidence.sums(run, step, Moment.START)
