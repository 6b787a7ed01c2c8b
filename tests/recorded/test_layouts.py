"""Recordings of right layouts are equivalent to those of one device, and all tensors are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck import Outcome
from tools.recorded.__main__ import DTYPES, verdicts_on_layouts
from tools.recorded.layouts import LAYOUTS

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("DDP, compiled", "hybrid FSDP1", "FSDP2 on 3", "FSDP2 x SP", "pipeline, GPipe")


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES if dtype != "float32")]
)
def test_right_layouts_are_equivalent(dtype: str, tmp_path: Path) -> None:
    """To one device, and to each other."""
    for pair, verdict in verdicts_on_layouts(QUICK, dtype, tmp_path).items():
        assert verdict.outcome is Outcome.EQUIVALENT, (pair, str(verdict))
        assert not [line for line in verdict.coverage if line.startswith("not compared")], pair


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_right_layouts_are_equivalent(dtype: str, tmp_path: Path) -> None:
    """20 layouts, and pairs of 12."""
    found = verdicts_on_layouts(list(LAYOUTS), dtype, tmp_path)
    assert {pair: str(verdict) for pair, verdict in found.items() if verdict.outcome is not Outcome.EQUIVALENT} == {}
