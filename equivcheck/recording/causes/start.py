"""Other initial parameters in the second run."""

from __future__ import annotations

from equivcheck.diagnosis.words import join_words, name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.evidence import Evidence, ranks_with_other_values
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.exact import ExactHash
from equivcheck.recording.trace import Moment


def wrong_start(evidence: Evidence) -> Diagnosis:
    """Say how the second run's initial parameters are wrong, and on which ranks."""
    one, other = (_hashes(run, evidence.step) for run in (evidence.first, evidence.second))
    names = evidence.wrong
    ranks = _wrong_ranks(evidence)
    who = f"{name_ranks(ranks)} start{'s' if len(ranks) == 1 else ''}" if ranks else "every rank starts"
    if not ranks and all(name in one and name in other and one[name].anywhere == other[name].anywhere for name in names):
        words = f"{who} with the elements of {tensors(names)} in wrong places: wrong order, or wrong dim"
        return Diagnosis(cause=Cause.PERMUTED, sentence=words, exact=True)
    elsewhere = {found.in_place: name for name, found in one.items()}
    same = [(name, elsewhere.get(other[name].in_place)) for name in names if name in other and not ranks]
    renamed = [f"`{name}` has the values of `{source}` in A" for name, source in same if source not in (None, name)]
    more = f": {join_words(renamed)}" if renamed else ""
    words = f"{who} with other values of {tensors(names)} than A{more}"
    return Diagnosis(cause=Cause.UNEQUAL_START, sentence=words, exact=True)


def _hashes(run: RecordedRun, step: int) -> dict[str, ExactHash]:
    """Return exact hashes for complete initial parameters."""
    found = {name: tensor.exact for name, tensor in run.tensors_at(step, Moment.START).items()}
    return {name: value for name, value in found.items() if value is not None}


def _wrong_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks with wrong replicas; empty if all replicas are wrong, or if ranks hold shards."""
    found = [ranks_with_other_values(evidence, name) for name in evidence.wrong]
    wrong = {rank for ranks in found for rank in ranks}
    return sorted(wrong) if len(wrong) < len(evidence.second.ranks) else []
