"""The search for a cause runs no more than it needs, and says how it ended without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import check_training
from equivcheck.diagnosis.emulation.emulated_ranks import norm_of
from equivcheck.diagnosis.mistake import Mistake, StepFacts, spans
from equivcheck.diagnosis.mistakes.stale import stale_values
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosing import Values
from equivcheck.user.diagnosis import explain
from equivcheck.user.diagnosis.catalogue.components import fused_as_one_block
from equivcheck.user.diagnosis.catalogue.layers import wrong_splits
from equivcheck.user.diagnosis.contradiction import Contradicted, RealValues, are_gradients_scaled
from equivcheck.user.diagnosis.diverged import DivergedTraining, diverged_training
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.known_backward import KnownBackward
from equivcheck.user.diagnosis.partial_reductions import partial_reductions
from equivcheck.user.task import Task
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from unit.user.diagnosis.unknown_faults import UNKNOWN, with_shared_weight
from unit.user.diagnosis.wrong_gradients import GRADIENTS
from unit.user.diagnosis.wrong_updates import UPDATES
from unit.user.programs import brought


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that checks a training and returns the evidence for its diagnosis."""

    def collect(**brought: Any) -> DivergedTraining:
        kept: list[DivergedTraining] = []

        def keep(_hint: str, task: Task, values: Values) -> Any:
            found = diverged_training(task, values.reference, values.single, values.traces, values.eps)
            assert found is not None
            kept.append(found)
            raise ArithmeticError

        monkeypatch.setattr("equivcheck.user.diagnosing.diagnosis_of", keep)
        with pytest.raises(ArithmeticError):
            check_training(**brought).describe()
        return kept[0]

    return collect


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A rank's number for each backward pass that runs in emulated ranks."""
    ran: list[int] = []
    own = EmulatedUserRanks._fresh_gradients

    def counted(self: EmulatedUserRanks, rank: int, loss: Any, backward: Any) -> Any:
        return own(self, rank, loss, lambda: (ran.append(rank), backward()))

    monkeypatch.setattr(EmulatedUserRanks, "_fresh_gradients", counted)
    return ran


def correct(diverged: DivergedTraining, known: KnownBackward, change: Any = lambda _ranks: None) -> Any:
    """Traces of emulated ranks on their own rows."""
    ranks = EmulatedUserRanks(diverged, own_rows=True)
    ranks.known = known
    change(ranks)
    return ranks.train(len(diverged.task.batches))


def double_gradient(ranks: EmulatedUserRanks) -> None:
    """Change a gradient, but not the loss."""
    ranks.models[0][3].register_forward_hook(lambda _module, _inputs, output: output * 2 - output.detach())


def start_elsewhere(ranks: EmulatedUserRanks) -> None:
    """Move a parameter on one rank, from the first step on."""
    with torch.no_grad():
        ranks.models[1][0].bias.add_(1.0)


def step_twice(ranks: EmulatedUserRanks) -> None:
    """Replace the user's step, without an effect."""
    own = ranks.task.step
    ranks.task = replace(ranks.task, step=partial(own))


def test_a_known_backward_pass_does_not_run_again(evidence: Any, passes: list[int]) -> None:
    """It has the same bits. It runs again if the model, the step or the parameters differ."""
    diverged, known = evidence(**GRADIENTS["not_clipped"].brought), KnownBackward()
    first = correct(diverged, known)
    num_passes = len(passes)
    assert num_passes == 2 * len(diverged.task.batches)
    known.is_complete = True
    second = correct(diverged, known)
    assert len(passes) == num_passes
    for one, other in zip(first, second, strict=True):
        pairs = zip(moments(one), moments(other), strict=True)
        assert all((left.snapshot.values == right.snapshot.values).all() for left, right in pairs)
    for change, num_again in ((double_gradient, 6), (step_twice, 6), (start_elsewhere, 5)):
        passes.clear()
        correct(diverged, known, change)
        assert len(passes) == num_again, change


def test_an_emulation_ends_at_the_first_clear_difference(evidence: Any) -> None:
    """Correct ranks have other gradients than ranks that do not clip, and end before they update."""
    diverged = evidence(**GRADIENTS["not_clipped"].brought)
    ranks, updated = EmulatedUserRanks(diverged, own_rows=True), list[int]()
    ranks.require = RealValues(diverged, (Phase.GRADIENT,)).require
    ranks.before_update.append(lambda rank, _step: updated.append(rank))
    with pytest.raises(Contradicted, match="step 0, gradient of"):
        ranks.train(len(diverged.task.batches))
    assert not updated


def test_one_emulated_rank_is_compared_with_every_real_rank(evidence: Any) -> None:
    """Rank 0 is right, and rank 1 does not clip."""
    diverged = evidence(**GRADIENTS["clip_on_one_rank"].brought)
    ranks = EmulatedUserRanks(diverged, own_rows=False, one=True)
    ranks.require = RealValues(diverged, (Phase.GRADIENT,)).require
    with pytest.raises(Contradicted, match=r"step 0, gradient of .* on rank 1"):
        ranks.train(len(diverged.task.batches))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("summed", True), ("not_clipped", True), ("tensors_not_clipped", True), ("not_reduced", False)],
)
def test_clipping_is_tried_only_if_gradients_are_multiples(evidence: Any, name: str, expected: bool) -> None:
    """A wrong norm multiplies each gradient by a factor, and each tensor has its own if a step clips tensors separately."""
    assert are_gradients_scaled(evidence(**GRADIENTS[name].brought)) is expected


def test_updates_are_not_tried_if_the_last_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong gradient is not blamed on an optimizer's setting, nor searched there."""
    tried: list[str] = []

    def spied(wrong: Any) -> Any:
        def candidates(*given: Any) -> Iterator[Mistake]:
            tried.append(wrong.__name__)
            yield from wrong(*given)

        return candidates

    spies = {wrong: spied(wrong) for wrong, _ in explain.CATALOGUE}
    monkeypatch.setattr(explain, "UPDATES", tuple(spies[wrong] for wrong in explain.UPDATES))
    monkeypatch.setattr(explain, "CATALOGUE", tuple((spies[wrong], phases) for wrong, phases in explain.CATALOGUE))
    assert check_training(**GRADIENTS["gradient_stale"].brought).kinds == (Cause.STALE,)
    assert "wrong_reductions" in tried
    assert "wrong_updates" not in tried
    assert check_training(**UPDATES["state_lost"].brought).kinds == (Cause.STATE_LOST,)
    assert "wrong_updates" in tried


def test_how_many_faults_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is counted. A pattern follows as a hint."""
    nothing_wrong = Mistake(cause=Cause.SCALED, sentence="nothing is wrong", change=lambda _ranks: None)
    monkeypatch.setattr(explain, "CATALOGUE", ((lambda *_: iter([nothing_wrong] * 7), tuple(Phase)),))
    verdict = check_training(**UNKNOWN["permuted"][0].brought)
    assert "why:   none of the 7 known faults reproduces this\n" in verdict.describe()
    assert "hint:  " in verdict.describe()
    monkeypatch.setattr(explain, "LONGEST_SECONDS", -1.0)
    monkeypatch.setattr("equivcheck.user.diagnosing._last", [])
    assert "none of the 0 known faults that were tried reproduces this; the search" in check_training(
        **UNKNOWN["permuted"][0].brought
    ).describe().replace("\n         ", " ")


def test_only_quick_faults_are_tried_after_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other faults need an emulation of all ranks, which takes longer."""
    tried: list[Cause] = []

    def double(ranks: EmulatedUserRanks, *, cause: Cause) -> None:
        tried.append(cause)
        ranks.multiply_gradients(lambda *_: 2.0)

    found = [Cause.SUMMED, Cause.MICROBATCHES_SUMMED, Cause.RESCALED_EACH_MICROBATCH]
    faults = [Mistake(cause, "doubled", partial(double, cause=cause), is_quick=cause is found[2]) for cause in found]
    monkeypatch.setattr(explain, "CATALOGUE", ((lambda *_: iter(faults), tuple(Phase)),))
    assert check_training(**GRADIENTS["summed"].brought).kinds == (found[0], found[2])
    assert tried == [found[0], found[2]]


def test_the_last_step_is_one_span(evidence: Any) -> None:
    """From the last step on, and only at the last step, is the same."""
    at_first = evidence(**GRADIENTS["summed"].brought)
    assert [each.words for each in spans(at_first)] == ["", ", at step 0 only"]
    assert [each.words for each in spans(replace(at_first, num_steps=1))] == [""]


def test_a_wrong_first_loss_is_blamed_on_nothing_older_or_later(evidence: Any) -> None:
    """Before the first loss, no value is old and no gradient exists, and a layer without a bias adds none."""
    facts = StepFacts(own_rows=False, num_backward=1, clips=False, differs=False)

    def tried(wrong: Any, *, bias: bool) -> set[Cause]:
        def partial_output(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Partial())}
            return parallelize_module(model, mesh, plan)

        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 2, bias=bias))

        found = evidence(**brought(model=build, parallelize=partial_output, mesh={"tp": 2}))
        assert (found.first.step, found.first.phase) == (0, Phase.LOSS)
        return {mistake.cause for mistake in wrong(found, facts)}

    assert not tried(stale_values, bias=True)
    assert tried(wrong_splits, bias=True) == {Cause.BIAS_ON_EVERY_RANK, Cause.PARTIAL_OUTPUT}
    assert tried(wrong_splits, bias=False) == {Cause.PARTIAL_OUTPUT}


class InParallel(nn.Module):
    """Several linears that read one input."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.parts, self.out = nn.ModuleDict({name: nn.Linear(4, 4) for name in names}), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sum the parts' outputs."""
        return self.out(torch.stack([torch.tanh(part(inputs)) for part in self.parts.values()]).sum(0))


@pytest.mark.parametrize(("names", "expected"), [("abc", 6), ("abcde", 5)])
def test_pairs_of_fused_weights_are_tried_only_if_few_may_be_fused(evidence: Any, names: str, expected: int) -> None:
    """Three weights may be fused, alone or in three pairs. Five weights are tried alone."""

    def partial_output(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = {f"parts.{name}": ColwiseParallel() for name in names}
        return parallelize_module(model, mesh, {**plan, "out": RowwiseParallel(output_layouts=Partial())})

    found = evidence(**brought(model=partial(InParallel, names), parallelize=partial_output, mesh={"tp": 2}))
    facts = StepFacts(own_rows=False, num_backward=1, clips=False, differs=False)
    assert len(list(fused_as_one_block(found, facts))) == expected


def test_a_lost_gradient_is_not_reduced_over_a_part(evidence: Any) -> None:
    """A sum over some ranks has at least one of their gradients, and a gradient of zeros has none."""
    assert not partial_reductions(evidence(**with_shared_weight(torch.zeros_like).brought))


def test_no_fault_is_tried_if_correct_ranks_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict says so, and does not claim that no fault fits."""
    monkeypatch.setattr(explain, "_correct", lambda *_, **__: None)
    verdict = check_training(**GRADIENTS["summed"].brought)
    assert verdict.cause == ""
    assert "why:   no known fault was tried" in verdict.describe()


def test_a_norm_is_rounded_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the norm of each tensor's norm: a norm over more elements has another rounding error, which is planted here."""
    own, tensors = torch.linalg.vector_norm, [torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0, 0.0])]
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda tensor, kind: own(tensor, kind) * (2.0 if tensor.numel() > 3 else 1.0)
    )
    assert float(norm_of(tensors, 2.0)) == float(nn.utils.get_total_norm(tensors, 2.0)) == 5.0
