"""Mutants of layers, optimizers, precision and the runtime: all kinds are there, and each is caught where it is smallest."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator

import pytest

from equivcheck import Outcome, check
from equivcheck.mutants.mutant import Family
from equivcheck.mutants.registry import mutant, mutants
from mutants.minimums_of_layers import MINIMUMS

FAMILIES = (Family.TENSOR_PARALLEL, Family.OPTIMIZER, Family.PRECISION, Family.RUNTIME)
NAMES = [name for name, found in mutants().items() if found.family in FAMILIES]

KINDS = {
    "norm weight gradient not reduced over TP under sequence parallel": "norm_gradient_not_reduced",
    "column-parallel backward all-reduce missing": "column_input_gradient_not_reduced",
    "the same all-reduce done twice": "column_input_gradient_reduced_twice",
    "row-parallel bias added on every rank": "row_bias_on_every_rank",
    "row-parallel reduce averages, not sums": "row_output_averaged",
    "sharded along the wrong dim": "sharded_along_wrong_dim",
    "fused weight split after sharding instead of before": "fused_weight_cut_in_halves",
    "shards permuted when reassembled": "columns_gathered_in_another_order",
    "weight decay on groups that should have none": "decay_on_groups_without",
    "coupled instead of decoupled weight decay": "decay_coupled",
    "step counter not advanced": "step_not_counted",
    "beta2 .99 for .999": "beta2_lowered",
    "epsilon 1e-6 for 1e-8": "eps_enlarged",
    "schedule stepped once per rank": "schedule_stepped_each_rank",
    "schedule stepped once per microbatch": "schedule_stepped_each_microbatch",
    "reduction in bf16": "reduced_in_bfloat16",
    "master weights in bf16": "masters_in_bfloat16",
    "unscaling missing before clipping": "unscaled_after_clipping",
    "recomputation draws a new dropout mask": "mask_drawn_anew_by_recomputation",
    "tied weights untied by wrapping": "tied_weight_left_behind",
    "one rank takes a different branch": "rank_skips_reduction",
    "asynchronous result read before wait()": "read_before_done",
    "one rank raises, the others wait": "rank_raises",
}
"""Ways in which parallel trainings of these families are known to go wrong, and the mutant that goes wrong in that way."""


@pytest.fixture(autouse=True)
def _tolerate_torch_warnings() -> Iterator[None]:
    """Half-finished runs make torch warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_known_kind_of_these_families_has_a_mutant() -> None:
    """No kind on the list is without one."""
    assert set(KINDS.values()) <= set(NAMES)


def test_every_mutant_of_these_families_has_a_minimum() -> None:
    """Each has one scenario that shows it, and none is left of a mutant that is gone."""
    assert sorted(MINIMUMS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_can_be_sent_to_processes(name: str) -> None:
    """Ranks may be processes, which are sent what to plant."""
    assert pickle.loads(pickle.dumps(mutant(name).plant)) == mutant(name).plant


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_caught_in_its_minimum_which_is_equivalent_without_it(name: str) -> None:
    """The scenario is as small as the mutant says, has what it breaks, and is a finding with it alone."""
    found, scenario = mutant(name), MINIMUMS[name]
    size = scenario.layout.mesh.num_ranks, len(scenario.training.model.layers), scenario.training.steps

    assert size == (found.minimum.ranks, found.minimum.layers, found.minimum.steps)
    assert scenario.layout.name in found.layouts
    assert found.applies(scenario)
    assert check(scenario).outcome is Outcome.EQUIVALENT
    assert check(scenario, alter=found.plant).outcome.is_finding
    assert check(scenario).outcome is Outcome.EQUIVALENT, "nothing that is planted stays with the ranks"
