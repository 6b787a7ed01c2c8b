"""Compare every tensor at every recorded point of a training on the ranks with the single-device run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equivcheck.oracle.comparison.assemble import Assembled, Assembler
from equivcheck.oracle.comparison.disagreement import element, loss_disagreements
from equivcheck.oracle.comparison.full_tensors import full_tensor_divergences
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import Reference
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.moments import Moment, ValueTrace, moments, moments_of_steps
from equivcheck.worlds.trace.tensors import Flags, Vector, norms
from equivcheck.worlds.trace.trace import Snapshot, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between the ranks' traces and the reference."""

    divergences: tuple[Divergence, ...]
    """All tensors with a difference, sorted by step, phase and tensor. Empty if the traces are equivalent."""
    worst_error: float
    """Largest error in a tensor, divided by the tensor's tolerance."""
    largest_share: float
    """Largest error beyond its tolerance, divided by the norm of the largest tensor of the same kind. Infinite if a difference is
    not numeric.
    """


def compare(reference: Reference, traces: Sequence[Trace | ValueTrace], before: Sequence[Trace] = ()) -> Comparison:
    """Compare all ranks' traces, in rank order, with the reference.

    If the first steps ran under another layout, `before` holds the traces from these steps.
    """
    first = moments_of_steps(before)
    ranks = [*first, *zip(*map(moments, traces), strict=True)]
    assembler = Assembler()
    divergences: list[Divergence] = []
    worst = share = 0.0
    for index, (expected, found) in enumerate(zip(reference.moments, ranks, strict=True)):
        groups = reference.loss_groups_before if index < len(first) else reference.loss_groups
        snapshots = holders = snapshots_of(list(found), expected.phase, groups)
        assembled = assembler.assemble(expected, snapshots)
        if expected.phase is Phase.LOSS:
            local = [moment.snapshot for moment in found]
            holders = local if len(groups) == 1 else []  # no rank holds a mean over several groups
            misfits = loss_disagreements(expected, local, groups)
            assembled = replace(assembled, misfits=(*assembled.misfits, *misfits))
        errors, wrong = errors_of(expected, assembled)
        worst = max(worst, float(errors.max(initial=0.0)))
        if wrong.any() or assembled.misfits:
            divergences += _describe(expected, assembled, errors, wrong, holders)
            if assembled.misfits or not expected.tolerances[wrong].all():
                share = float("inf")  # if all tensors of a kind are zero, noise cannot explain a difference
            else:
                sizes = errors[wrong] * expected.tolerances[wrong]
                share = max(share, float((sizes / np.maximum(expected.scales[wrong], np.finfo(np.float64).tiny)).max()))
        otherwise = full_tensor_divergences(expected, assembled, [moment.full for moment in found])
        if otherwise:
            divergences += otherwise
            share = float("inf")
    return Comparison(divergences=tuple(divergences), worst_error=worst, largest_share=share)


def comparison_before(step: int, found: Comparison) -> Comparison:
    """Return the comparison with only the divergences before `step`, because the reference cannot judge later ones."""
    before = tuple(divergence for divergence in found.divergences if divergence.step < step)
    return replace(found, divergences=before, worst_error=found.worst_error if before else min(found.worst_error, 1.0))


def snapshots_of(found: list[Moment], phase: Phase, groups: Sequence[Sequence[int]] = ()) -> list[Snapshot]:
    """Return the snapshots in `found`, which holds every rank's values at one point in training.

    In the loss phase, return one snapshot with the mean over all ranks that have a loss. Each item of `groups` holds ranks with
    the same loss, and counts once in this mean.
    """
    snapshots = [moment.snapshot for moment in found]
    if phase is not Phase.LOSS:
        return snapshots
    losses = {rank: snapshot.values for rank, snapshot in enumerate(snapshots) if snapshot.present[0]}
    if not losses:
        return snapshots[:1]
    members = [[losses[rank] for rank in group if rank in losses] for group in groups or [[rank] for rank in losses]]
    mean = np.mean([np.mean(each, axis=0) for each in members if each], axis=0)
    return [replace(snapshots[next(iter(losses))], values=mean)]


def errors_of(expected: Expected, assembled: Assembled) -> tuple[Vector, Flags]:
    """Compare the full tensors assembled from ranks with the expected ones. Returns an error and a flag for each tensor.

    The error is the norm of the difference, divided by the tensor's tolerance. The flag is set if the norm exceeds the tolerance.
    Elements that no rank holds count as equal.
    """
    same = (assembled.values == expected.values) | (np.isnan(assembled.values) & np.isnan(expected.values)) | ~assembled.covered
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, assembled.values - expected.values)
    size = norms(expected.table, distance)
    size[np.isnan(size)] = np.inf
    wrong = size > expected.tolerances
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.where(size == 0.0, 0.0, size / expected.tolerances)
    return errors, wrong


def _describe(
    expected: Expected,
    assembled: Assembled,
    errors: Vector,
    wrong: Flags,
    snapshots: Sequence[Snapshot],
) -> list[Divergence]:
    rows = expected.table.rows
    found = [
        Divergence(
            step=expected.step,
            phase=expected.phase,
            tensor=misfit.name,
            difference=misfit.difference,
            rank=misfit.rank,
            ranks=misfit.ranks,
            index=misfit.index,
            expected=misfit.expected,
            actual=misfit.actual,
            elsewhere=misfit.elsewhere,
            error=float("inf"),
        )
        for misfit in assembled.misfits
    ]
    taken = {divergence.tensor for divergence in found}
    found += [
        _value(expected, assembled, int(row), float(errors[row]), snapshots)
        for row in np.flatnonzero(wrong)
        if expected.table.names[row] not in taken
    ]
    return sorted(found, key=lambda divergence: rows.get(divergence.tensor, len(rows)))


def _value(expected: Expected, assembled: Assembled, row: int, error: float, snapshots: Sequence[Snapshot]) -> Divergence:
    table = expected.table
    start = table.offsets[row]
    end = table.offsets[row + 1] if row + 1 < len(table.offsets) else table.total
    distance = np.abs(assembled.values[start:end] - expected.values[start:end])
    position = start + int(np.argmax(np.nan_to_num(distance, nan=np.inf)))
    actual = float(assembled.values[position])
    holders = []
    for rank, snapshot in enumerate(snapshots):
        pieces = zip(snapshot.pieces, snapshot.present, strict=True)
        held = (table.positions(piece) for piece, present in pieces if piece.name == table.names[row] and present)
        if any(positions is not None and position in positions for positions in held):
            holders.append(rank)
    return Divergence(
        step=expected.step,
        phase=expected.phase,
        tensor=table.names[row],
        difference=Difference.NAN if np.isnan(actual) else Difference.VALUE,
        rank=holders[0] if holders else -1,
        ranks=tuple(holders),
        index=element(table, position)[1],
        expected=repr(float(expected.values[position])),
        actual=repr(actual),
        error=error,
    )
