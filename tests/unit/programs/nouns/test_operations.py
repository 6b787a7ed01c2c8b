"""The table of operations."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.registry import FAMILIES, OPERATIONS
from equivcheck.programs.run.calls import function_of, source
from equivcheck.programs.run.one_device import plan_of
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.system.torch_version import is_torch_in

LATER = {"foreach_clone": ">=2.12"}
"""Operations missing in some torch versions, with the versions that have them."""


def test_names_are_unique() -> None:
    """No operation hides another."""
    assert len(OPERATIONS) == sum(map(len, FAMILIES.values())) > 300


def test_every_call_is_a_function_in_python() -> None:
    """The text shared by ranks, one device and scripts compiles under the operation's name."""
    for name, facts in OPERATIONS.items():
        assert function_of(name).__name__ == name
        assert source(facts).startswith(f"def {name}(a")


def test_every_operation_applies_somewhere_in_its_sweep() -> None:
    """One device computes it for some arguments, on each torch that has it."""
    sweeps = {name: Sweep(operations=(name,)).programs() for name in OPERATIONS}
    idle = [name for name, programs in sweeps.items() if not any(all(plan_of(each).applies) for each in programs)]
    assert idle == [name for name, versions in LATER.items() if not is_torch_in(versions)]
