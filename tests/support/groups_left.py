"""Groups that a run leaves behind, in a module that the processes of gloo can import."""

from torch.distributed import distributed_c10d as c10d

from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import Scenario


def num_groups_left(scenario: Scenario) -> int:
    """Groups that a rank still has after a run, and had not before its second."""
    rank_program(scenario)
    before = len(c10d._world.pg_map)
    rank_program(scenario)
    return len(c10d._world.pg_map) - before
