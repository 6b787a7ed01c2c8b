"""Programs as scripts that need only torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck.export.forked import run_forked
from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, TensorProgram
from equivcheck.programs.run.script import script_of

RIGHT = TensorProgram(
    mesh=(2, 1),
    statements=(
        Leaf(shape=(5, 3), placements=("P(avg)", "S(1)")),
        Constant(shape=(2,), placements=("R", "R"), contents=Contents.INDICES, high=5),
        Operation(name="embedding", arguments=(2, 1)),
        Redistribution(placements=("S(0)", "R")),
        RoundTrip(),
        Operation(name="softmax", dim=7),
        Operation(name="topk", dim=-1, output=1),
        Operation(name="exp", arguments=(2,)),
    ),
)
WRONG = TensorProgram(
    mesh=(2,), statements=(Leaf(shape=(4,), placements=("S(0)",)), Operation(name="item"), Operation(name="exp"))
)


@pytest.mark.parametrize(("program", "code"), [(RIGHT, 0), (WRONG, 1)], ids=["right", "wrong"])
def test_a_script_says_whether_ranks_differ(program: TensorProgram, code: int, tmp_path: Path) -> None:
    """The exit code covers values and gradients of all statements. The script does not import equivcheck."""
    script = tmp_path / "repro.py"
    script.write_text(script_of(program), encoding="utf-8")
    assert "equivcheck" not in script.read_text(encoding="utf-8")
    found, printed = run_forked(script, program.num_ranks, tmp_path)
    assert found == code, printed
    assert ("no difference" in printed) == (code == 0)
