"""What is generated of differentiable collectives, and their gradients by the NumPy model. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from collectives import model
from collectives.cases import (
    CONCATENATED,
    EXTENTS,
    REDUCTIONS,
    ROOTED,
    SEEDS,
    SIZES,
    Case,
    Kind,
    groups,
    inputs_of,
    numbers,
    rows_of,
    shapes,
)
from collectives.gradient_memory import Allowed, Memories, Memory, Side, memories, memory_of
from collectives.model import Array
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.torch_version import is_torch_in

Arrays = list[Array]


class Form(PrintableEnum):
    """Where a differentiable collective comes from."""

    NN = "nn"
    """``torch.distributed.nn.functional``."""
    FUNCTIONAL = "functional"
    """``torch.distributed._functional_collectives``."""
    AUTOGRAD = "autograd"
    """The ``_autograd`` ones of these, which had a backward before the others did."""
    IN_PLACE = "in_place"
    """The ``_inplace`` ones of these, which the compiler puts in the place of ``torch.distributed``."""
    PERMUTE = "permute"
    """``permute_tensor`` of these: every member sends all that it has to one other."""
    COALESCED = "coalesced"
    """Those for several tensors at once: here the input and twice the input."""
    CONTEXT_PARALLEL = "context_parallel"
    """``flex_cp_allgather`` of DTensor's context parallelism, for two tensors likewise."""


FORMS: dict[Form, tuple[Kind, ...]] = {
    Form.NN: tuple(kind for kind in Kind if kind not in (Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE)),
    Form.FUNCTIONAL: (Kind.ALL_REDUCE, Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE, Kind.ALL_TO_ALL_SINGLE),
    Form.AUTOGRAD: (Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE, Kind.ALL_TO_ALL_SINGLE),
    Form.IN_PLACE: (
        Kind.ALL_REDUCE,
        Kind.REDUCE_SCATTER,
        Kind.REDUCE_SCATTER_SINGLE,
        Kind.ALL_GATHER,
        Kind.ALL_GATHER_SINGLE,
        Kind.ALL_TO_ALL_SINGLE,
    ),
    Form.PERMUTE: (Kind.ALL_TO_ALL_SINGLE,),
    Form.COALESCED: (Kind.ALL_REDUCE, Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE),
    Form.CONTEXT_PARALLEL: (Kind.ALL_GATHER_SINGLE,),
}
DTYPES = ("float64", "float32")
ALONG_ANY_DIM = (Form.FUNCTIONAL, Form.AUTOGRAD, Form.CONTEXT_PARALLEL)
"""Those that gather and scatter along any dim."""
ASYNCHRONOUS = (Form.FUNCTIONAL, Form.AUTOGRAD, Form.PERMUTE, Form.COALESCED)
"""Those that give tensors which are waited for when they are used."""
SEVERAL_OUTPUTS = tuple((Form.NN, kind) for kind in (Kind.GATHER, Kind.ALL_GATHER, Kind.ALL_TO_ALL))
"""Those that give several tensors, of which some may have no gradient."""
TWICE = (Form.COALESCED, Form.CONTEXT_PARALLEL)
"""Those that take two tensors."""
BACKWARD, NO_BACKWARD = ">=2.11", "<2.11"
"""The versions of torch in which functional collectives have a backward, and in which they have none: see `differences`."""
OF_FIRST_RANKS = {Kind.BROADCAST: "<2.14", Kind.GATHER: "", Kind.SCATTER: "", Kind.ALL_GATHER: "", Kind.ALL_TO_ALL: ""}
"""Where ``nn.functional`` takes ranks within the group for global ones, or the other way round, and in which versions."""
ALWAYS = (Form.NN, Form.AUTOGRAD)
"""Forms that have a backward in all versions."""
SINCE = {(Form.IN_PLACE, Kind.REDUCE_SCATTER): ">=2.14"}
"""The versions of torch that have a function at all; not here if that is all of those with `BACKWARD`."""
COMBINATIONS = tuple(
    (form, kind)
    for form, kinds in FORMS.items()
    for kind in kinds
    if (form in ALWAYS or is_torch_in(BACKWARD)) and is_torch_in(SINCE.get((form, kind), ""))
)
LOST_BY_METHOD = {(Form.COALESCED, Kind.REDUCE_SCATTER_SINGLE): "", (Form.AUTOGRAD, Kind.REDUCE_SCATTER_SINGLE): NO_BACKWARD}
"""What has no gradient, or none over gloo, if it is waited for by the method, and in which versions: see `differences`."""
ALLOWED: dict[Side, dict[tuple[Form, Kind], Allowed]] = {
    Side.INPUTS: {
        (Form.NN, Kind.BROADCAST): Allowed.ONE_ORDER,
        (Form.NN, Kind.REDUCE): Allowed.ONE_ORDER,
        (Form.NN, Kind.SCATTER): Allowed.DENSE,
        (Form.NN, Kind.ALL_TO_ALL_SINGLE): Allowed.ROWS,
    },
    Side.GRADIENTS: {
        (Form.NN, Kind.BROADCAST): Allowed.ONE_ORDER,
        (Form.NN, Kind.REDUCE): Allowed.ONE_ORDER,
        (Form.NN, Kind.GATHER): Allowed.DENSE,
        (Form.NN, Kind.ALL_GATHER): Allowed.IN_ORDER,
    },
}
"""How tensors may lie in memory where that is not `Allowed.ANY`; see `memory_differences` for what torch does else."""


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


class Waiting(PrintableEnum):
    """When a functional collective is waited for."""

    BY_USE = "by use"
    """When its output is used."""
    BY_METHOD = "by method"
    """By ``wait`` of the output."""
    BY_FUNCTION = "by function"
    """By ``wait_tensor``."""
    AFTER_BACKWARD = "after backward"
    """When its output is read, which is after the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """A collective and the gradient of a weighted sum of all that it gives."""

    form: Form
    """Whose."""
    case: Case
    """The call."""
    dim: int = 0
    """Along which a single tensor is gathered or scattered."""
    inputs: Memories = ()
    """How what goes in lies in memory."""
    gradients: Memories = ()
    """How the gradients of what comes out do."""
    waiting: Waiting = Waiting.BY_USE
    """When a functional collective is waited for."""
    unused: bool = False
    """Whether the gradient is that of the first output alone, of a tensor that is gathered or exchanged."""


def weights_of(derivative: Derivative, member: int) -> list[Arrays]:
    """What a member's outputs are multiplied with, for each tensor that goes in and each output that it gives."""
    count = 2 if derivative.form in TWICE else 1
    return [_weights(derivative, member, index) for index in range(count)]


def _weights(derivative: Derivative, member: int, index: int) -> Arrays:
    """The same number for all elements where their gradient is to be expanded, and zeros where an output is not used."""
    case = derivative.case
    generator = np.random.default_rng([case.seed, member, 1, index])
    number = numbers(generator, case, ())
    found = []
    for place, shape in enumerate(case.received_shapes(member)):
        given = numbers(generator, case, shape)
        expanded = memory_of(derivative.gradients, member, output_of(derivative, index, place)) is Memory.EXPANDED
        given = np.full(shape, number, dtype=given.dtype) if expanded else given
        found.append(np.zeros_like(given) if derivative.unused and (index or place) else given)
    return found


def output_of(derivative: Derivative, index: int, place: int) -> int:
    """Which of the call's outputs a part that a member receives is in."""
    return index if derivative.case.kind in CONCATENATED else place


def expected_gradients(derivative: Derivative) -> list[Arrays]:
    """Per member, the gradient of each input or part."""
    case = derivative.case
    weights = [weights_of(derivative, member) for member in range(len(case.group))]
    found = adjoint(case, [given[0] for given in weights])
    if derivative.form not in TWICE:
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
    more = [row.ops for row in ALL_REDUCED if row.form is form and is_torch_in(row.torch)] if kind is Kind.ALL_REDUCE else []
    return ("sum", *sum(more, ())) if kind in REDUCTIONS else ("",)


def works_in(derivative: Derivative, world: str) -> bool:
    """Whether a world, too, can differentiate what torch can."""
    rows = [row for row in ALL_REDUCED if row.form is derivative.form and derivative.case.op in row.ops]
    return all(world in row.worlds for row in rows)


@st.composite
def derivatives(draw: DrawFn, form: Form, kind: Kind, size: int) -> Derivative:
    """Collectives that torch can differentiate."""
    group = draw(groups(size))
    if form is Form.NN and kind in OF_FIRST_RANKS and is_torch_in(OF_FIRST_RANKS[kind]):
        group = tuple(range(len(group)))
    return draw(_derivatives_of(form, kind, group))


@st.composite
def _derivatives_of(draw: DrawFn, form: Form, kind: Kind, group: tuple[int, ...]) -> Derivative:
    single = kind in (Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE)
    unused = (form, kind) in SEVERAL_OUTPUTS and draw(st.booleans())
    case = Case(
        kind=kind,
        group=group,
        dtype=draw(st.sampled_from(DTYPES)),
        shape=() if form is Form.PERMUTE else draw(shapes(min_dims=int(single or form is Form.IN_PLACE))),
        rows=draw(_rows(form, kind, len(group))),
        op=draw(st.sampled_from(ops_of(form, kind))),
        root=draw(st.integers(0, len(group) - 1)) if kind in ROOTED else 0,
        seed=draw(SEEDS),
    )
    dim = draw(st.integers(0, len(case.shape) - 1)) if single and form in ALONG_ANY_DIM else 0
    return Derivative(
        form=form,
        case=case,
        dim=dim,
        inputs=draw(memories(Side.INPUTS, allowed(Side.INPUTS, form, kind), len(group))),
        gradients=draw(memories(Side.GRADIENTS, allowed(Side.GRADIENTS, form, kind, unused), len(group))),
        waiting=draw(_waitings(form, kind, dim)),
        unused=unused,
    )


def _waitings(form: Form, kind: Kind, dim: int) -> st.SearchStrategy[Waiting]:
    """Without the calls of ``wait`` that lose the backward, or make it raise over gloo: see `differences`."""
    if form not in ASYNCHRONOUS:
        return st.just(Waiting.BY_USE)
    lost = dim > 0 or is_torch_in(LOST_BY_METHOD.get((form, kind), "<0"))
    return st.sampled_from([waiting for waiting in Waiting if not (lost and waiting is Waiting.BY_METHOD)])


@st.composite
def _rows(draw: DrawFn, form: Form, kind: Kind, size: int) -> tuple[tuple[int, ...], ...]:
    if kind is not Kind.ALL_TO_ALL_SINGLE:
        return ()
    if form is not Form.PERMUTE:
        return draw(rows_of(kind, size))
    rows, receivers = draw(EXTENTS), draw(st.permutations(range(size)))
    return tuple(tuple(rows if receiver == theirs else 0 for receiver in range(size)) for theirs in receivers)


def allowed(side: Side, form: Form, kind: Kind, unused: bool = False) -> Allowed:
    """How tensors are generated to lie in memory; the gradients of what is not used are zeros, and contiguous.

    While `Form.AUTOGRAD` had a backward of its own, it refused all others: see `differences`.
    """
    if form is Form.AUTOGRAD and is_torch_in(NO_BACKWARD):
        return Allowed.ROWS
    found = ALLOWED[side].get((form, kind), Allowed.ANY)
    return Allowed.ROWS if unused and found is Allowed.DENSE else found


@st.composite
def derivative_batches(draw: DrawFn, form: Form, kind: Kind) -> tuple[int, tuple[Derivative, ...]]:
    """A world's size and some differentiable calls."""
    size = draw(SIZES)
    return size, tuple(draw(st.lists(derivatives(form, kind, size), min_size=1, max_size=8)))
