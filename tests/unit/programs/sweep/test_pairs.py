"""Sweeps over pairs of operations."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Operation, TensorProgram
from equivcheck.programs.run.one_device import Outputs, plan_of
from equivcheck.programs.run.rank import DTensorTarget
from equivcheck.programs.sweep import sweep
from equivcheck.programs.sweep.pairs import Novelty, Pairs
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.programs.sweep.results import Result, first_programs, results_on
from equivcheck.programs.sweep.second_programs import argument_positions
from equivcheck.programs.sweep.sweep import run_sweep
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.pool import ranks
from unit.programs.smallest import SMALLEST_PROGRAMS

FIRSTS = ("neg", "to_int", "t", "sum_dim", "topk")
SECONDS = ("exp", "square", "add", "mm", "cat")


@pytest.fixture(scope="module")
def results() -> tuple[Result, ...]:
    """Results from a few operations and from redistributions."""
    return tuple(results_on(ranks("sim", 2), first_programs(Sweep(operations=FIRSTS))))


def pairs_of(results: tuple[Result, ...], *operations: str, seed: int = 0) -> Pairs:
    """Pairs whose second operation is in `operations`."""
    return Pairs(results=results, places=argument_positions(operations), seed=seed)


def first_of(program: TensorProgram) -> TensorProgram:
    """The part of a pair up to the first operation or redistribution."""
    length = next(
        number for number, each in enumerate(program.statements, start=1) if each.tag in ("operation", "redistribution")
    )
    return TensorProgram(mesh=program.mesh, statements=program.statements[:length])


def test_results_lie_as_dtensor_leaves_them(results: tuple[Result, ...]) -> None:
    """With dtype, strides and shard sizes. Each output counts as a result."""
    found = {(result.name, result.spec.kind, result.spec.memory, result.spec.sizes) for result in results}
    assert ("to_int", (("S(0)",), "int64"), frozenset({"no gradient"}), frozenset()) in found
    assert any("uneven" in sizes for _, _, _, sizes in found)
    assert any(name == "t" and "not contiguous" in memory for name, _, memory, _ in found)
    assert any(name == "sum_dim" and placements == ("P(sum)",) for name, (placements, _), _, _ in found)
    assert {result.spec.dtype for result in results if result.name == "topk"} == {"float64", "int64"}
    assert any(result.name == "redistribution" for result in results)


def test_every_pair_is_a_program_whose_last_operation_takes_a_result(results: tuple[Result, ...]) -> None:
    """One device computes each statement of it."""
    pairs, known = pairs_of(results, *SECONDS), {result.program for result in results}
    programs = [program for program in pairs if program is not None]
    assert len(programs) == len(set(programs)) > 250
    for program in programs:
        first, last = first_of(program), program.statements[-1]
        assert first in known
        assert isinstance(last, Operation)
        assert len(program.statements) - len(first.statements) in last.arguments
        assert all(plan_of(program).applies)


def test_all_pairs_are_tried_in_the_end(results: tuple[Result, ...]) -> None:
    """All pairs are covered that one device can compute: a tensor without dims has no matrix product."""
    pairs = pairs_of(results, "exp", "mm")
    assert len(list(pairs)) == len(pairs)
    assert all(pairs.num_tried[each] == pairs.total(each) >= pairs.num_covered[each] > 0 for each in Novelty)
    assert pairs.num_covered[Novelty.FIRST] < pairs.total(Novelty.FIRST)


def test_placements_and_dtypes_that_an_operation_has_not_met_come_first(results: tuple[Result, ...]) -> None:
    """Later programs have no new ones. Leaves in a sweep of single operations are not new either."""
    specs = {result.program: result.spec for result in results}
    pairs, met = pairs_of(results, "exp", "square", "add"), set()
    for program in pairs:
        if program is None:
            continue
        spec, operation = specs[first_of(program)], program.operations[-1]
        if pairs.num_tried[Novelty.SPEC] == 0:
            assert not spec.can_be_leaf
            met.add((operation, spec.kind))
        else:
            assert spec.can_be_leaf or (operation, spec.kind) in met
    kinds = [((placement,), "int64") for placement in ("R", "S(0)", "S(1)")]
    if is_torch_in(">=2.12"):  # neg() of a maximum is a minimum, which no leaf in a sweep is; before, it is replicated
        kinds.append((("P(min)",), "float64"))
    assert met == set(itertools.product(("exp", "square", "add"), kinds))


def test_a_seed_says_what_is_run(results: tuple[Result, ...]) -> None:
    """A seed determines the programs; another one gives other arguments or another order."""
    first, again, other = (list(pairs_of(results, *SECONDS, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


class SquaresOfIntegers(DTensorTarget):
    """Squares of integers are one too large."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Run the operation, but add one to squares of integers."""
        found = super().call(statement, arguments)
        is_wrong = statement.name == "square" and not arguments[0].is_floating_point()
        return tuple(each + 1 for each in found) if is_wrong else found


def test_a_fault_that_only_a_pair_shows_is_found(results: tuple[Result, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves are never integers."""
    monkeypatch.setattr(sweep, "check_program", partial(check_program, target=SquaresOfIntegers))
    assert run_sweep(Sweep(operations=("square",)).programs()).num_findings == 0
    found = run_sweep(pairs_of(results, "square"), only_sinks=True)
    assert {group.operation for group in found.groups.values() if group.outcome.is_finding} == {"square"}


def test_what_an_operation_takes_is_not_read_before() -> None:
    """Reading the output of a row-sharded embedding drops the mask that the next operation needs."""
    program = SMALLEST_PROGRAMS["dtensor_embedding_read_twice"]
    assert check_program(program).outcome is Outcome.KNOWN
    assert check_program(program, only_sinks=True).outcome is Outcome.EQUIVALENT
