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
    ("names", "dtype"),
    [
        pytest.param(QUICK, "float32", id="some"),
        *(pytest.param(tuple(LAYOUTS), dtype, id=dtype, marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_right_layouts_are_equivalent(names: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    """To one device, and to each other. By default some are tested, and in torch environments all 20, with pairs of 12."""
    for pair, verdict in verdicts_on_layouts(names, dtype, tmp_path).items():
        assert verdict.outcome is Outcome.EQUIVALENT, (pair, str(verdict))
        assert not [line for line in verdict.coverage if line.startswith("not compared")], pair
