"""A reference of one run, for differences so large that no measurement of noise could explain them.

While a scenario shrinks, the same large fault is checked again and again, and much of the time of a check goes into perturbed
runs, which decide about small differences only.
"""

from __future__ import annotations

import numpy as np

from equivcheck.oracle.reference.noise import Expected, scales_of
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.tensors import Table, full_vector, norms, table_of
from equivcheck.worlds.trace.trace import Trace


def coarse_moments(reference: Trace, limit: float) -> tuple[Expected, ...]:
    """Every moment of a reference; tolerated is the share `limit` of the largest tensor of a kind.

    Nothing beyond `noise_limit` is passed by the full judgement: noise as large as that puts the reference in doubt there.
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
    """Whether anything is beyond a coarse tolerance but losses.

    A loss may be zero by cancellation, and has no other of its kind: of its noise nobody would doubt the reference.
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
