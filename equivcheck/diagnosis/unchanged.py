"""Which elements of parameters an update left as they were, though the reference's changed."""

from __future__ import annotations

import numpy as np

from equivcheck.diagnosis.case import Case
from equivcheck.trace.differences import Phase
from equivcheck.trace.pieces import Whole
from equivcheck.train.material import material


def unchanged(case: Case) -> dict[str, np.ndarray]:
    """Per tensor that differs first after an update, the elements that were not updated; empty unless these explain it all."""
    if case.first.phase is not Phase.UPDATE:
        return {}
    before, after = _parameters(case, case.first.step - 1), _parameters(case, case.first.step)
    expected = case.expected_values(case.first.step, Phase.UPDATE)
    masks = {}
    for name in case.differing(Phase.UPDATE):
        if name not in after or name not in expected:
            return {}
        still = after[name] == before[name]
        near = np.isclose(after[name], expected[name], rtol=1e-6, atol=0.0)
        if not (still | near).all():
            return {}
        masks[name] = still & (expected[name] != before[name])
        if not masks[name].any():
            # The first rank that holds it has updated it rightly; others have not.
            return {}
    return masks


def _parameters(case: Case, step: int) -> Whole:
    """Full parameters as the ranks left them at a step; before the first, those given."""
    if step < 0:
        return {name: values.numpy() for name, values in material(case.scenario.training).parameters.items()}
    return case.whole(step, Phase.UPDATE)
