"""The diagnosis distinguishes ranks that clip by their local norm from ranks that clip by another norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from equivcheck.user.diagnosis import clipping_repair
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Piece, Snapshot

RIGHT = {"first": 3.0, "second": 4.0, "unused": 0.0}
"""Gradients before clipping, one element each: their norm is 5, and one device clips to 1."""


def trace_of(gradients: dict[str, float]) -> SimpleNamespace:
    """A rank's trace with these gradients, after clipping."""
    held = Snapshot(
        pieces=tuple(Piece(name=name, shape=(1,)) for name in gradients),
        present=(True,) * len(gradients),
        fits=(True,) * len(gradients),
        dtypes=("float64",) * len(gradients),
        values=np.array(list(gradients.values())),
    )
    return SimpleNamespace(steps=[SimpleNamespace(gradients=held)])


@pytest.mark.parametrize(
    ("clipped", "are_local"),
    [
        (({"first": 1.0}, {"second": 1.0}), True),
        (({"first": 0.6}, {"second": 1.0}), False),
        (({"first": 1.0}, {"second": 1.0}, {"unused": 0.0}), True),
        (({"first": 1.0}, {"second": 1.0}, {}), True),
    ],
    ids=["local", "another norm", "a rank with zeros only", "a rank without gradients"],
)
def test_ranks_without_gradients_do_not_count(
    clipped: tuple[dict[str, float], ...], are_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has no gradients, or zeros only, shows nothing about its norm."""
    held = SimpleNamespace(by=lambda name, rank: torch.tensor([name in clipped[rank]]))
    monkeypatch.setattr(clipping_repair, "held_elements", lambda _diverged: held)
    diverged = SimpleNamespace(
        first=SimpleNamespace(step=0),
        expected_values=lambda _step, _phase: {name: np.array([value / 5]) for name, value in RIGHT.items()},
        traces=[trace_of(each) for each in clipped],
    )
    right = clipping_repair._Clippings(
        norms=[5.0], gradients={name: torch.tensor([value]) for name, value in RIGHT.items()}, kind=2.0
    )
    assert clipping_repair._are_local(diverged, right) is are_local


@pytest.mark.parametrize(
    ("scaled", "is_hinted"),
    [(({"first": 5.0}, {"second": 5.0}), True), (({"first": 3.0 + 1e-9, "second": 4.0 + 1e-9}, {"unused": 0.0}), False)],
    ids=["local", "one rank has all gradients"],
)
def test_a_small_difference_is_no_local_norm_if_one_rank_has_all_gradients(
    scaled: tuple[dict[str, float], ...], is_hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's norm is then the norm over all elements."""
    held = SimpleNamespace(by=lambda name, rank: torch.tensor([name in scaled[rank]]))
    monkeypatch.setattr(clipping_repair, "held_elements", lambda _diverged: held)
    monkeypatch.setattr(clipping_repair, "are_gradients_scaled", lambda _diverged: True)
    diverged: Any = SimpleNamespace(
        first=SimpleNamespace(step=0, phase=Phase.GRADIENT),
        expected_values=lambda _step, _phase: {name: np.array([value]) for name, value in RIGHT.items()},
        traces=[trace_of(each) for each in scaled],
    )
    assert (clipping_repair.clipped_by_hand(diverged) is not None) is is_hinted
