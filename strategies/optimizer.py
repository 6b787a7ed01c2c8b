"""Strategies for optimizers with hyperparameters from short lists: well conditioned, printed exactly, the default first."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AdjustLR,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from equivcheck.scenario.optimizer import OPTIMIZERS
from equivcheck.strategies.chance import EVENLY, MOSTLY, SOMETIMES

KINDS: SearchStrategy[type[Optimizer]] = st.sampled_from((*OPTIMIZERS, SGD, Adam, AdamW))
"""All optimizers; the most popular optimizers come twice."""

_MOMENTUM = st.sampled_from((0.0, 0.9, 0.5))
_MOMENTUM_OPTIONS: SearchStrategy[dict[str, Any]] = st.sampled_from(({}, {"nesterov": True}, {"dampening": 0.5}))
_LR = st.sampled_from((0.05, 0.01, 0.1))
_DECAY = st.sampled_from((0.0, 0.1, 0.01))
_BETAS = st.sampled_from(((0.9, 0.999), (0.9, 0.99), (0.5, 0.9)))
_EPS = st.sampled_from((1e-8, 1e-6, 1e-3))
_IMPLEMENTATIONS = {kind: st.sampled_from(kind.implementations()) for kind in OPTIMIZERS}
_MAXIMIZE = {kind: SOMETIMES if kind.has_maximize else st.just(False) for kind in OPTIMIZERS}

_COUPLED: dict[str, SearchStrategy[Any]] = {"lr": _LR, "weight_decay": _DECAY}
_ADAPTIVE: dict[str, SearchStrategy[Any]] = {**_COUPLED, "betas": _BETAS, "eps": _EPS}

HYPERPARAMETERS: dict[type[Optimizer], dict[str, SearchStrategy[Any]]] = {
    SGD: {**_COUPLED, "momentum": _MOMENTUM},
    Adam: {**_ADAPTIVE, "amsgrad": SOMETIMES},
    AdamW: {**_ADAPTIVE, "amsgrad": SOMETIMES},
    Adamax: _ADAPTIVE,
    NAdam: {**_ADAPTIVE, "momentum_decay": st.sampled_from((4e-3, 0.0, 0.1)), "decoupled_weight_decay": EVENLY},
    RAdam: {**_ADAPTIVE, "decoupled_weight_decay": EVENLY},
    Adagrad: {
        **_COUPLED,
        "lr_decay": st.sampled_from((0.0, 0.1)),
        "initial_accumulator_value": st.sampled_from((0.0, 0.1)),
        "eps": st.sampled_from((1e-10, 1e-8, 1e-3)),
    },
    Adadelta: {
        **_COUPLED,
        "lr": st.sampled_from((0.05, 1.0)),
        "rho": st.sampled_from((0.9, 0.5)),
        "eps": st.sampled_from((1e-6, 1e-3)),
    },
    RMSprop: {**_COUPLED, "alpha": st.sampled_from((0.99, 0.9)), "eps": _EPS, "momentum": _MOMENTUM, "centered": SOMETIMES},
    Rprop: {
        "lr": _LR,
        "etas": st.sampled_from(((0.5, 1.2), (0.25, 2.0))),
        "step_sizes": st.sampled_from(((1e-6, 50.0), (1e-3, 0.1))),
    },
    ASGD: {
        **_COUPLED,
        "lambd": st.sampled_from((1e-4, 0.1)),
        "alpha": st.sampled_from((0.75, 0.5)),
        "t0": st.sampled_from((1e6, 1.0, 0.0)),
    },
    Adafactor: {
        **_COUPLED,
        "beta2_decay": st.sampled_from((-0.8, -0.5)),
        "eps": st.sampled_from(((None, 1e-3), (1e-6, 1e-3), (1e-3, 0.1))),
        "d": st.sampled_from((1.0, 2.0)),
    },
    Muon: {
        **_COUPLED,
        "lr": st.sampled_from((0.02, 0.01, 0.005)),
        "momentum": st.sampled_from((0.95, 0.5, 0.0)),
        "nesterov": MOSTLY,
        "ns_steps": st.sampled_from((5, 3, 1)),
        "adjust_lr_fn": st.sampled_from(AdjustLR),
    },
}
"""For each optimizer, strategies for its own hyperparameters."""


@st.composite
def optimizers(draw: DrawFn, *, kinds: SearchStrategy[type[Optimizer]] = KINDS) -> Optimizer:
    """Draw optimizers from `kinds`, with drawn hyperparameters, flags and implementation."""
    kind = draw(kinds)
    chosen: dict[str, Any] = {name: draw(values) for name, values in HYPERPARAMETERS[kind].items()}
    if kind is SGD and chosen["momentum"] > 0.0:
        chosen |= draw(_MOMENTUM_OPTIONS)
    return kind(maximize=draw(_MAXIMIZE[kind]), implementation=draw(_IMPLEMENTATIONS[kind]), **chosen)
