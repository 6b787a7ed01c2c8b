"""The declared treatment of torch's state matches the installed torch."""

from __future__ import annotations

import re
from fnmatch import translate

import pytest

from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.audit.found import Search
from equivcheck.worlds.audit.table import StateRow, Treatment, rows, unclassified_names
from equivcheck.worlds.sim.stand_ins import profiling
from equivcheck.worlds.sim.stand_ins.refused import REFUSED

WRITTEN_FOR = pytest.mark.skipif(not is_torch_in("==2.13.*"), reason="the table has names that torch 2.13 has")
COMPLETE_FOR = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Versions in the tox environments."""


@pytest.fixture(scope="module")
def found() -> tuple[str, ...]:
    """Names for all state in this torch."""
    with Search() as search:
        return search.names()


@pytest.mark.skipif(
    not any(is_torch_in(f"=={version}") for version in COMPLETE_FOR), reason="what this torch has was not looked at"
)
def test_nothing_is_unclassified(found: tuple[str, ...]) -> None:
    """Every piece of torch's state has a declared treatment in sim."""
    assert unclassified_names(found) == ()


@WRITTEN_FOR
def test_an_entry_that_is_not_in_the_table_is_noticed(found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are unclassified if their row is removed from the table."""
    row = next(row for row in rows() if any("_gen_transform_infos" in name for name in row.names))
    monkeypatch.setattr("equivcheck.worlds.audit.table.rows", lambda: tuple(other for other in rows_before if other is not row))
    assert "torch.distributed.tensor._redistribute._gen_transform_infos" in unclassified_names(found)


rows_before = rows()


def declared() -> list[tuple[StateRow, str]]:
    """All names declared for this torch version."""
    switched_or_outside = (Treatment.OUTSIDE, Treatment.RESTORED)
    return [
        (row, name)
        for row in rows()
        if row.treatment not in switched_or_outside and not row.torch and "when ranks take turns" not in row.reason
        for name in row.names
    ]


@WRITTEN_FOR
def test_every_name_is_found(found: tuple[str, ...]) -> None:
    """The table has no name that is misspelt or gone from torch."""
    assert [name for _, name in declared() if not any(re.match(translate(name), there) for there in found)] == []


@WRITTEN_FOR
def test_what_is_refused_says_so() -> None:
    """The error of a rank starts with the reason in a refused row."""
    errors = (*REFUSED, profiling.REFUSAL)
    refused = [row for row in rows() if row.treatment is Treatment.REFUSED]
    assert [row.reason for row in refused if not any(text.startswith(row.reason) for text in errors)] == []


@WRITTEN_FOR
@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers",
        "torch.distributed.tensor._redistribute._gen_transform_infos",
        "torch.distributed.fsdp.wrap._ConfigAutoWrap.in_autowrap_context",
        "torch.nn.parallel.distributed.DistributedDataParallel._active_ddp_module",
        "torch.utils.checkpoint._enable_checkpoint_early_stop",
        "torch.nn.modules.module._global_forward_hooks",
        "torch.autograd.profiler.KinetoStepTracker._current_step",
        "torch._C._set_deterministic_algorithms",
    ],
)
def test_the_walk_finds_each_kind_of_state(found: tuple[str, ...], name: str) -> None:
    """Finds an attribute, a cache, a class attribute assigned by a function, a global, a container, and a C++ flag."""
    assert name in found
