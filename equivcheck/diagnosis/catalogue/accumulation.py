"""Gradients that pipelines, data-parallel or context-parallel ranks sum or divide too often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import tensors
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import LocalDataParallel, Pipeline
from equivcheck.scenario.mesh import CP, DP, PP


def wrong_microbatches(diverged: DivergedRun, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: after each microbatch, accumulated gradients are summed over ranks or divided by chunks again."""
    if facts.num_backward == 1:
        return
    model, num_parts = diverged.training.model, diverged.mesh.size(CP)
    counts = {
        weight.name: len(weight.ranks)
        for pipeline in diverged.layout.of(Pipeline)
        for weight in weights_of_several_ranks(model, pipeline, diverged.mesh.size(PP))
    }
    if counts:
        yield _again(diverged, counts, f"of {tensors(list(counts))} is summed over its copies")
    for pipeline in diverged.layout.of(Pipeline) if diverged.layout.num_chunks > 1 else ():
        chunks = pipeline.num_chunks
        yield _again(diverged, dict.fromkeys(diverged.updated, 1 / chunks), f"is divided by the {chunks} chunks of a microbatch")
    num_ranks = diverged.mesh.size(DP) if diverged.layout.has(LocalDataParallel) else 1
    if num_ranks > 1:
        yield _again(diverged, dict.fromkeys(diverged.updated, num_ranks), f"is summed over {diverged.ranks_text((DP,))}")
    if num_parts > 1:
        yield _again(diverged, dict.fromkeys(diverged.updated, num_parts), f"is summed over {diverged.ranks_text((CP,))}")


def _again(diverged: DivergedRun, counts: Mapping[str, float], words: str) -> Mistake:
    last = diverged.num_microbatches - 1

    def change(ranks: EmulatedRanks) -> None:
        ranks.multiply_gradients(lambda name, microbatch, _step: counts.get(name, 1) ** (last - microbatch))

    sentence = f"the accumulated gradient {words} again after each microbatch"
    return Mistake(Cause.RESCALED_EACH_MICROBATCH, sentence, change, is_quick=True)
