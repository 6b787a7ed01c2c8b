"""Tensors that no rank can read are left out of the comparison."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.user.judging import UserCase
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Snapshot
from unit.user.programs import task_of

NOTHING = Snapshot(pieces=(), present=(), fits=(), dtypes=(), values=np.empty(0))
WRONG = Divergence(step=0, phase=Phase.GRADIENT, tensor="0.weight", difference=Difference.VALUE, rank=0)


@pytest.fixture
def run() -> SingleDeviceRun:
    """A single-device run over two data ranks with `full_tensors`."""
    return SingleDeviceRun(task_of(full_tensors=lambda module: dict(module.named_parameters())))


def test_state_that_no_rank_hands_over_is_left_out(run: SingleDeviceRun) -> None:
    """Unread state is named, not compared, and does not raise doubt."""
    read, unread = (UserCase(run, [trace]) for trace in (run.trace, replace(run.trace, state=NOTHING)))

    (expected,) = (moment for moment in unread.judge_case().reference().moments if moment.phase is Phase.STATE)

    assert read.unread == ()
    assert unread.unread == expected.table.names
    assert not any(expected.present)
    assert read.hint(WRONG) == unread.hint(WRONG) == ""
