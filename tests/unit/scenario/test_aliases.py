"""Tests that JSON with former names is read, and written with current ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

from equivcheck.errors import InvalidScenario
from equivcheck.scenario import FSDP2, ActivationSharding, LayerPlan, Split, TensorParallel, Wrapping
from equivcheck.scenario.file_format.aliases import FORMER_FIELDS, FORMER_VALUES
from equivcheck.scenario.file_format.codec import decode, encode
from equivcheck.scenario.file_format.converter import make_converter


def test_former_values_are_read() -> None:
    """A plan written with the former values means the same."""
    plan = [
        {"split": "column", "output": "features"},
        {"split": "row", "output": "whole"},
        {"split": "within", "output": "whole"},
        {"split": "outside", "output": "whole"},
    ]
    old = {"kind": "tensor_parallel", "plan": plan, "source": "outside", "source_output": "whole", "head": "column"}
    assert decode(TensorParallel, old) == TensorParallel(
        plan=(
            LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES),
            LayerPlan(split=Split.ROWWISE),
            LayerPlan(split=Split.HEADS_OR_HIDDEN),
            LayerPlan(split=Split.NOT_IN_PLAN),
        ),
        head=Split.COLWISE,
    )
    assert decode(FSDP2, {"kind": "fsdp2", "wrapping": "whole"}) == FSDP2(wrapping=Wrapping.ROOT_ONLY)


@pytest.mark.parametrize("enum", FORMER_VALUES)
def test_former_values_are_not_written(enum: type[Enum]) -> None:
    """No former value is a current one."""
    assert not FORMER_VALUES[enum].keys() & {member.value for member in enum}
    assert all(decode(enum, former) is member for former, member in FORMER_VALUES[enum].items())
    assert all(encode(member) == member.value for member in enum)


@dataclass(frozen=True, kw_only=True)
class _Renamed:
    current: int


def test_former_fields_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A former field name sets the current field; both together are refused."""
    monkeypatch.setitem(FORMER_FIELDS, _Renamed, {"former": "current"})
    converter = make_converter(lambda: None)
    assert converter.structure({"former": 1}, _Renamed) == converter.structure({"current": 1}, _Renamed) == _Renamed(current=1)
    assert converter.unstructure(_Renamed(current=1)) == {"current": 1}
    with pytest.raises(Exception, match="While structuring _Renamed"):
        converter.structure({"former": 1, "current": 2}, _Renamed)


def test_unknown_values_are_refused_with_current_ones() -> None:
    """The message lists only current values."""
    with pytest.raises(
        InvalidScenario, match=r'split: "diagonal" is not valid\. Expected one of: replicated, colwise, rowwise, '
    ):
        decode(LayerPlan, {"split": "diagonal"})
