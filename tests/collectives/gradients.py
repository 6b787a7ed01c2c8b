"""What is generated of differentiable collectives, and their gradients by the NumPy model. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from collectives import model
from collectives.cases import REDUCTIONS, ROOTED, SEEDS, SIZES, Case, Kind, groups, inputs_of, numbers, rows_of, shapes
from collectives.model import Array
from equivcheck.choice import Choice
from equivcheck.torch_version import torch_in

Arrays = list[Array]


class Form(Choice):
    """Where a differentiable collective comes from."""

    NN = "nn"
    """``torch.distributed.nn.functional``."""
    FUNCTIONAL = "functional"
    """``torch.distributed._functional_collectives``."""
    COALESCED = "coalesced"
    """The same, for two tensors at once: the input and twice the input."""


FORMS: dict[Form, tuple[Kind, ...]] = {
    Form.NN: tuple(kind for kind in Kind if kind not in (Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE)),
    Form.FUNCTIONAL: (Kind.ALL_REDUCE, Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE, Kind.ALL_TO_ALL_SINGLE),
    Form.COALESCED: (Kind.ALL_REDUCE, Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE),
}
BACKWARD, NO_BACKWARD = ">=2.11", "<2.11"
"""The versions of torch in which functional collectives have a backward, and in which they have none: see `differences`."""
OF_FIRST_RANKS = {Kind.BROADCAST: "<2.14", Kind.GATHER: "", Kind.SCATTER: "", Kind.ALL_GATHER: "", Kind.ALL_TO_ALL: ""}
"""Where ``nn.functional`` takes ranks within the group for global ones, or the other way round, and in which versions."""
COMBINATIONS = tuple((form, kind) for form, kinds in FORMS.items() if form is Form.NN or torch_in(BACKWARD) for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Reductions besides the sum whose backward an all-reduce has; see `differences` for what torch does elsewhere."""

    form: Form
    """Whose."""
    ops: tuple[str, ...]
    """Which."""
    torch: str = ""
    """The versions that have it; empty for all."""
    worlds: tuple[str, ...] = ("sim", "gloo")
    """Where it works."""


ALL_REDUCED = (
    Reduction(form=Form.NN, ops=("avg",)),
    Reduction(form=Form.FUNCTIONAL, ops=("avg",), torch=">=2.14"),
    Reduction(form=Form.FUNCTIONAL, ops=("min", "max"), torch=">=2.15"),
    Reduction(form=Form.COALESCED, ops=("avg",), torch=">=2.15"),
    Reduction(form=Form.COALESCED, ops=("min", "max"), torch=">=2.15", worlds=("sim",)),
)
"""Of coalesced extrema the backward mostly raises over gloo: see `WRITES_WHAT_IS_SAVED` in `differences`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """A collective and the gradient of a weighted sum of all that it gives."""

    form: Form
    """Whose."""
    case: Case
    """The call."""
    dim: int = 0
    """Along which a single tensor is gathered or scattered."""


def weights_of(derivative: Derivative, member: int) -> list[Arrays]:
    """What a member's outputs are multiplied with, for each tensor that goes in and each output that it gives."""
    case = derivative.case
    generator = np.random.default_rng([case.seed, member, 1])
    count = 2 if derivative.form is Form.COALESCED else 1
    return [[numbers(generator, case, shape) for shape in case.received_shapes(member)] for _ in range(count)]


def expected_gradients(derivative: Derivative) -> list[Arrays]:
    """Per member, the gradient of each input or part."""
    case = derivative.case
    weights = [weights_of(derivative, member) for member in range(len(case.group))]
    found = adjoint(case, [given[0] for given in weights])
    if derivative.form is not Form.COALESCED:
        return found
    twice = adjoint(case, [given[1] for given in weights])
    return [[one + 2 * two for one, two in zip(*both, strict=True)] for both in zip(found, twice, strict=True)]


def adjoint(case: Case, weights: Sequence[Arrays]) -> list[Arrays]:
    """The model's gradients of every member's inputs, given those of every member's outputs."""
    whole = [given[0] for given in weights]
    if case.op in ("min", "max"):
        inputs = [inputs_of(case, member)[0] for member in range(len(case.group))]
        return [[array] for array in model.extremum_adjoint(inputs, whole, case.op)]
    found: dict[Kind, Callable[[], Sequence[Array | Arrays]]] = {
        Kind.BROADCAST: lambda: model.broadcast_adjoint(whole, case.root),
        Kind.ALL_REDUCE: lambda: model.all_reduce_adjoint(whole, case.op),
        Kind.REDUCE: lambda: model.reduce_adjoint(whole, case.op, case.root),
        Kind.REDUCE_SCATTER: lambda: model.reduce_scatter_adjoint(whole, case.op),
        Kind.REDUCE_SCATTER_SINGLE: lambda: model.reduce_scatter_adjoint(whole, case.op),
        Kind.ALL_GATHER: lambda: model.all_gather_adjoint(weights),
        Kind.ALL_GATHER_SINGLE: lambda: model.all_gather_adjoint(weights),
        Kind.GATHER: lambda: model.gather_adjoint(weights, case.root),
        Kind.SCATTER: lambda: model.scatter_adjoint(whole, case.root),
        Kind.ALL_TO_ALL: lambda: model.all_to_all_adjoint(weights),
        Kind.ALL_TO_ALL_SINGLE: lambda: model.all_to_all_adjoint(weights),
    }
    return [given if isinstance(given, list) else [np.asarray(given)] for given in found[case.kind]()]


def ops_of(form: Form, kind: Kind) -> tuple[str, ...]:
    """Reductions that the installed torch can differentiate."""
    more = [row.ops for row in ALL_REDUCED if row.form is form and torch_in(row.torch)] if kind is Kind.ALL_REDUCE else []
    return ("sum", *sum(more, ())) if kind in REDUCTIONS else ("",)


def works_in(derivative: Derivative, world: str) -> bool:
    """Whether a world, too, can differentiate what torch can."""
    rows = [row for row in ALL_REDUCED if row.form is derivative.form and derivative.case.op in row.ops]
    return all(world in row.worlds for row in rows)


@st.composite
def derivatives(draw: DrawFn, form: Form, kind: Kind, size: int) -> Derivative:
    """Collectives that torch can differentiate."""
    group = draw(groups(size))
    if form is Form.NN and kind in OF_FIRST_RANKS and torch_in(OF_FIRST_RANKS[kind]):
        group = tuple(range(len(group)))
    single = kind in (Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE)
    case = Case(
        kind=kind,
        group=group,
        dtype=draw(st.sampled_from(("float64", "float32"))),
        shape=draw(shapes(min_dims=int(single))),
        rows=draw(rows_of(kind, len(group))) if kind is Kind.ALL_TO_ALL_SINGLE else (),
        op=draw(st.sampled_from(ops_of(form, kind))),
        root=draw(st.integers(0, len(group) - 1)) if kind in ROOTED else 0,
        seed=draw(SEEDS),
    )
    dim = draw(st.integers(0, len(case.shape) - 1)) if single and form is Form.FUNCTIONAL else 0
    return Derivative(form=form, case=case, dim=dim)


@st.composite
def derivative_batches(draw: DrawFn, form: Form, kind: Kind) -> tuple[int, tuple[Derivative, ...]]:
    """A world's size and some differentiable calls."""
    size = draw(SIZES)
    return size, tuple(draw(st.lists(derivatives(form, kind, size), min_size=1, max_size=8)))
