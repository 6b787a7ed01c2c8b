"""Which elements of parameters an update left as they were, though the reference's changed."""

from __future__ import annotations

import numpy as np

from equivcheck.oracle.diagnosis.case import Case
from equivcheck.oracle.pieces import Whole, fill, parts_of
from equivcheck.oracle.verdict import Phase
from equivcheck.train.material import material


def unchanged(case: Case) -> dict[str, np.ndarray]:
    """Per tensor that differs first after an update, the elements that were not updated; empty unless these explain it all."""
    if case.first.phase is not Phase.UPDATE:
        return {}
    before, after = _parameters(case, case.first.step - 1), _parameters(case, case.first.step)
    expected = case.expected_parameters(case.first.step)
    masks = {}
    for name in case.differing(Phase.UPDATE):
        if name not in after or name not in expected:
            return {}
        still = after[name] == before[name]
        near = np.isclose(after[name], expected[name], rtol=1e-6, atol=0.0)
        if not (still | near).all():
            return {}
        masks[name] = still & (expected[name] != before[name])
    return masks


def _parameters(case: Case, step: int) -> Whole:
    """Full parameters as the ranks left them at a step; before the first, those given."""
    if step < 0:
        return {name: values.numpy() for name, values in material(case.scenario.training).parameters.items()}
    found: Whole = {}
    (moments,) = [
        found
        for expected, found in zip(case.reference.moments, case.found, strict=True)
        if (expected.step, expected.phase) == (step, Phase.UPDATE)
    ]
    for moment in reversed(moments):
        for piece, values in parts_of(moment.snapshot):
            if piece.name and values is not None:
                fill(found.setdefault(piece.name, np.full(piece.shape, np.nan)), piece, values)
    return found
