"""What gloo computes sim computes, beyond single collectives, and what gloo refuses it refuses."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from collectives.agreement_programs import PROGRAMS, REFUSED, Program, lists_of_other_shapes_to_all
from collectives.cases import LIST_ALL_TO_ALL
from collectives.worlds import WORLDS, run_in
from equivcheck.system.torch_version import is_torch_in

RANKS = 2
GLOO = pytest.param("gloo", marks=pytest.mark.torch(">=2.10", "gloo ends the process of an earlier version where it refuses"))
ALL_REFUSED = (*REFUSED, lists_of_other_shapes_to_all) if is_torch_in(LIST_ALL_TO_ALL) else REFUSED


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_sim_computes_what_gloo_computes(program: Program) -> None:
    """The same values on every rank."""
    sim, gloo = (run_in(world, RANKS, program) for world in WORLDS)
    assert sim == gloo


@pytest.mark.parametrize("world", ["sim", GLOO])
@pytest.mark.parametrize("program", ALL_REFUSED, ids=lambda program: program.__name__)
def test_what_does_not_go_together_is_refused(program: Program, world: str) -> None:
    """Each call raises on every rank, and the next one works."""
    for errors in run_in(world, RANKS, program):
        assert all(errors), errors
        assert world == "gloo" or all(error.startswith("CallRefused: ") for error in errors), errors
    assert run_in(world, RANKS, dist.get_world_size) == (RANKS, RANKS)
