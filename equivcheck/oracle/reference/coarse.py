"""A reference from one run, for differences that are too large for any rounding noise.

Perturbed runs take most time in a check, but they decide about small differences only. A scenario that shrinks shows the same
large difference again and again, so its checks skip them.
"""

from __future__ import annotations

import numpy as np

from equivcheck.oracle.reference.noise import Expected, scales_of
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.tensors import Table, full_vector, norms, table_of
from equivcheck.worlds.trace.trace import Trace


def coarse_moments(reference: Trace, limit: float) -> tuple[Expected, ...]:
    """Reference moments. The tolerance is `limit` times the largest tensor of the same kind.

    The full judgement passes nothing beyond `noise_limit` either: such noise puts the reference in doubt.
    """
    tables: dict[int, Table] = {}
    found = []
    for moment in moments(reference):
        pieces = moment.snapshot.pieces
        if id(pieces) not in tables:
            tables[id(pieces)] = table_of(pieces)
        found.append(_expected(moment, tables[id(pieces)], limit))
    return tuple(found)


def is_large(divergences: tuple[Divergence, ...]) -> bool:
    """True if a tensor other than a loss exceeds its coarse tolerance.

    A loss can be zero by cancellation and is the only tensor of its kind, so its size says nothing about its noise.
    """
    return any(divergence.phase is not Phase.LOSS for divergence in divergences)


def _expected(moment: Moment, table: Table, limit: float) -> Expected:
    snapshot = moment.snapshot
    values = full_vector(table, snapshot.present, snapshot.values)
    own = norms(table, values)
    scales = scales_of(moment.phase, table, own)
    return Expected(
        step=moment.step,
        phase=moment.phase,
        table=table,
        present=snapshot.present,
        dtypes=snapshot.dtypes,
        values=values,
        norms=own,
        tolerances=limit * scales,
        scales=scales,
        shifts=np.zeros_like(own),
    )
