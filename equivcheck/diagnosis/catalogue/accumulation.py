"""Updates between microbatches, and gradients summed too often by pipelines and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Change, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import tensors
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Pipeline
from equivcheck.scenario.mesh import CP, PP
from equivcheck.training.accumulate import microbatch_loss, scalar_value
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def wrong_microbatches(diverged: DivergedRun, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes with microbatches: repeated reductions, and updates after each microbatch."""
    if facts.num_backward > 1:
        yield from _summed_again(diverged)
        yield from _stepped(diverged)


def _summed_again(diverged: DivergedRun) -> Iterator[Mistake]:
    model, num_parts = diverged.training.model, diverged.mesh.size(CP)
    counts = {
        weight.name: len(weight.ranks)
        for pipeline in diverged.layout.of(Pipeline)
        for weight in weights_of_several_ranks(model, pipeline, diverged.mesh.size(PP))
    }
    if counts:
        yield _again(diverged, counts, f"of {tensors(list(counts))} is summed over its copies")
    if num_parts > 1:
        yield _again(diverged, dict.fromkeys(diverged.updated, num_parts), f"is summed over {diverged.ranks_text((CP,))}")


def _again(diverged: DivergedRun, counts: Mapping[str, int], words: str) -> Mistake:
    last = diverged.num_microbatches - 1

    def change(ranks: EmulatedRanks) -> None:
        ranks.multiply_gradients(lambda name, microbatch, _step: counts.get(name, 1) ** (last - microbatch))

    sentence = f"the accumulated gradient {words} again after each microbatch"
    return Mistake(Cause.RESCALED_EACH_MICROBATCH, sentence, change, is_quick=True)


def _stepped(diverged: DivergedRun) -> Iterator[Mistake]:
    words = "the optimizer steps after each microbatch, not once after all"
    share = (1.0,) * diverged.num_microbatches
    full = tuple(diverged.training.data.batch / rows for rows in diverged.microbatch_rows)
    for zeroing, more in ((True, ""), (False, ", with the gradients accumulated so far")):
        for weights in dict.fromkeys((share, full if diverged.training.loss.is_mean else share)):
            yield on_one_device(Cause.STEPPED_EACH_MICROBATCH, words + more, _stepping(weights, zeroing=zeroing))


def _stepping(weights: Sequence[float], *, zeroing: bool) -> Change:
    optimizers: list[torch.optim.Optimizer] = []

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for number, (batch, weight) in enumerate(zip(microbatches, weights, strict=False)):  # a trailing window is shorter
            loss = microbatch_loss(setup, batch, index, batch.rows)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += scalar_value(loss)
            if number < len(microbatches) - 1:
                optimizers[-1].step()
                if zeroing:
                    optimizers[-1].zero_grad()
        return total

    def change(setup: Setup) -> None:
        setup.before_step.append(lambda optimizer, _step: optimizers.append(optimizer))
        setup.compute = compute

    return change
