"""Recordings of each recipe's layouts lead to the same outcome as `check_training`."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest

from equivcheck import Matrix, Outcome, compare
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.user.reference import trace_of
from equivcheck.worlds.trace.differences import Phase
from examples.recipes import EXAMPLES, RECIPES
from recorded.places import later_than
from tools.recorded.runs import RecordedRanks, record_one_device

pytestmark = pytest.mark.filterwarnings("ignore")


SLOW = ("llama", "mixture_of_experts", "plain_tensor_parallel")
"""Recipes with many layouts, or large ones."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RECIPES])
def test_recordings_of_a_recipe_are_as_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EQUIVALENT, or DIVERGED no later than the planted bug shows in all values."""
    monkeypatch.setattr("equivcheck.user.diagnosing.diagnosis_of", lambda hint, *_: UserDiagnosis(hint=hint))
    monkeypatch.syspath_prepend(EXAMPLES)  # so that ranks import the recipe, and do not get copies of its classes
    matrix: Matrix = importlib.import_module(name).matrix
    for row in matrix.unchecked:
        members = RecordedRanks(math.prod(size for _, size in row.mesh), tmp_path / row.name)
        found = matrix.row(row.name, members)
        assert found.is_as_expected, found.details
        task = members.arguments[0]
        one, *moved = record_one_device(lambda task=task: trace_of(task, seed=task.seed), tmp_path / row.name / "one device")
        verdict = compare(one, members.folder, moved=moved)
        assert verdict.outcome is row.expected, (row.name, str(verdict))
        if row.expected is Outcome.DIVERGED:
            step, phase, tensor = re.fullmatch(r"step (\d+) (\w+) (.+)", found.first_difference).groups()  # type: ignore[union-attr]
            is_absent = row.name.startswith("empty expert skipped")  # an absent gradient counts as zero until the update
            assert not later_than(verdict, int(step), Phase.UPDATE if is_absent else Phase(phase), tensor), row.name
