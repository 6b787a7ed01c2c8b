"""Where torch's gradients are not the adjoint, why, and in which versions. All others are generated and must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from collectives import model
from collectives.cases import IN_PARTS, REDUCTIONS, ROOTED, Case, Kind
from collectives.gradient_memory import Memory
from collectives.gradients import (
    BACKWARD,
    FORMS,
    NO_BACKWARD,
    OF_FIRST_RANKS,
    Arrays,
    Derivative,
    Form,
    Waiting,
    ops_of,
    weights_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One derivative that torch defines otherwise, refuses or gets wrong."""

    name: str
    """What differs."""
    derivative: Derivative
    """The call."""
    torch: str = ""
    """The versions of torch that differ; empty for all."""
    worlds: tuple[str, ...] = ("sim", "gloo")
    """Where it differs so; another row has the other."""
    gradients: Callable[[list[Arrays]], list[Arrays]] | None = None
    """Everybody's gradients by torch, from everybody's weights; NaN for one that is not there, None where it raises."""
    text: str = ""
    """Regular expression that the error's text contains, forward or backward; with gradients, timing decides."""
    reason: str
    """Why."""


def weights(derivative: Derivative) -> list[Arrays]:
    """Everybody's weights of the only tensor that goes in."""
    return [weights_of(derivative, member)[0] for member in range(len(derivative.case.group))]


def _derivative(form: Form, kind: Kind, op: str = "", group: tuple[int, ...] = (0, 1, 2), root: int = 0) -> Derivative:
    return Derivative(form=form, case=Case(kind=kind, group=group, shape=(2,), op=op, root=root, seed=5))


def _reduced(op: str) -> Difference:
    return Difference(
        name=f"nn.all_reduce of {op}",
        derivative=_derivative(Form.NN, Kind.ALL_REDUCE, op),
        gradients=lambda given: [[array] for array in model.all_reduce([each[0] for each in given], op)],
        reason="the backward reduces gradients as the forward reduced values, which is right for sums and means only",
    )


def _root_broadcast(op: str) -> Difference:
    return Difference(
        name=f"nn.reduce of {op}",
        derivative=_derivative(Form.NN, Kind.REDUCE, op, root=1),
        gradients=lambda given: [[given[1][0]]] * len(given),
        reason="the backward broadcasts the root's gradient, whatever the reduction, and does not divide it for a mean",
    )


def _gathered(op: str) -> Difference:
    return Difference(
        name=f"nn.reduce_scatter of {op}",
        derivative=_derivative(Form.NN, Kind.REDUCE_SCATTER, op),
        gradients=lambda given: model.all_gather([each[0] for each in given]),
        reason="the backward gathers gradients, whatever the reduction, and does not divide them for a mean",
    )


def _refused(form: Form, kind: Kind, op: str) -> Difference:
    return Difference(
        name=f"{form.value} {kind.value} of {op}",
        derivative=_derivative(form, kind, op),
        torch=BACKWARD,
        text="backward only supports ['`]sum",
        reason="the backward is there for other reductions only, and says so (pytorch #190007)",
    )


def _no_gradient(form: Form, kind: Kind, worlds: tuple[str, ...] = ("sim", "gloo"), text: str = "") -> Difference:
    op, parts = ("sum" if kind in REDUCTIONS else ""), (3 if kind in IN_PARTS else 1)
    return Difference(
        name=f"{form.value} {kind.value} without a backward",
        derivative=_derivative(form, kind, op, root=1 if kind in ROOTED else 0),
        torch=NO_BACKWARD,
        worlds=worlds,
        gradients=lambda given: [[np.full_like(given[0][0], np.nan)] * parts] * len(given),
        text=text,
        reason="it has no backward: a warning, and no gradient for what went in (pytorch #152131)",
    )


VIEWED = "A view was created in no_grad mode and is being modified inplace"
"""What mostly comes of waiting for a gathered tensor, of which gloo makes views in a thread; else there is no gradient either."""
LOSES_VIEWS = ">=2.12"
"""The versions of torch in which a gather along another dim is a view where it can be."""
WRITES_WHAT_IS_SAVED = ">=2.15"
"""The backward of a coalesced extremum raises over gloo, which writes its outputs from a thread, mostly after they were saved.

A rank whose outputs were written before has gradients, or waits in vain for those that raised. As that depends on timing, it is
no row here but a test of its own.
"""


DIFFERENCES = (
    *(_reduced(op) for op in ("max", "min", "product")),
    *(make(op) for make in (_root_broadcast, _gathered) for op in ("avg", "max", "min", "product")),
    Difference(
        name="functional.all_gather_single of one row along another dim, waited for by method",
        derivative=Derivative(
            form=Form.FUNCTIONAL,
            case=Case(kind=Kind.ALL_GATHER_SINGLE, group=(0, 1, 2), shape=(1, 2)),
            dim=1,
            waiting=Waiting.BY_METHOD,
        ),
        torch=LOSES_VIEWS,
        text="does not require grad",
        reason="it is a view of a tensor that is waited for at its use, and waiting for a view has no backward",
    ),
    Difference(
        name="coalesced reduce_scatter_single waited for by method",
        derivative=replace(_derivative(Form.COALESCED, Kind.REDUCE_SCATTER_SINGLE, "sum"), waiting=Waiting.BY_METHOD),
        torch=BACKWARD,
        worlds=("gloo",),
        text="is a view and its base or another view of its base has been modified inplace",
        reason="gloo makes views in a thread, as of gathered tensors before; sim has the adjoint",
    ),
    Difference(
        name="autograd reduce_scatter_single waited for by method",
        derivative=replace(_derivative(Form.AUTOGRAD, Kind.REDUCE_SCATTER_SINGLE, "sum"), waiting=Waiting.BY_METHOD),
        torch=NO_BACKWARD,
        worlds=("gloo",),
        gradients=lambda given: [[np.zeros(2)] * len(given)] * len(given),
        reason="over gloo all gradients are zero; sim has the adjoint",
    ),
    *(
        Difference(
            name=f"autograd all_gather_single of {name} with dims reversed",
            derivative=Derivative(
                form=Form.AUTOGRAD, case=Case(kind=Kind.ALL_GATHER_SINGLE, group=(0, 1, 2), shape=(2, 2)), **sides
            ),
            torch=NO_BACKWARD,
            text="is_contiguous",
            reason="it takes contiguous tensors only, forward and backward",
        )
        for name, sides in (
            ("inputs", {"inputs": (Memory.REVERSED,) * 3}),
            ("gradients", {"gradients": (Memory.REVERSED,) * 3}),
        )
    ),
    Difference(
        name="permute_tensor of two dims",
        derivative=Derivative(
            form=Form.PERMUTE,
            case=Case(kind=Kind.ALL_TO_ALL_SINGLE, group=(0, 1), shape=(3,), rows=((0, 2), (2, 0))),
        ),
        text="[Ss]plit.sizes",
        reason="it counts elements where rows are exchanged",
    ),
    _no_gradient(Form.FUNCTIONAL, Kind.BROADCAST),
    *(
        _no_gradient(form, kind)
        for form in (Form.FUNCTIONAL, Form.COALESCED)
        for kind in FORMS[form]
        if kind is not Kind.ALL_GATHER_SINGLE
    ),
    *(
        _no_gradient(form, Kind.ALL_GATHER_SINGLE, (world,), text)
        for form in (Form.FUNCTIONAL, Form.COALESCED)
        for world, text in (("sim", ""), ("gloo", VIEWED))
    ),
    *(
        _refused(form, kind, op)
        for form in (Form.FUNCTIONAL, Form.COALESCED)
        for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER_SINGLE)
        for op in ("avg", "min", "max", "product")
        if op not in ops_of(form, kind)
    ),
    Difference(
        name="functional.broadcast",
        derivative=_derivative(Form.FUNCTIONAL, Kind.BROADCAST, root=1),
        torch=BACKWARD,
        gradients=lambda given: given,
        reason="it has no backward of its own, so that gradients stay where they are: wrong numbers (pytorch #152127)",
    ),
    Difference(
        name="nn.broadcast in a group of later ranks",
        derivative=_derivative(Form.NN, Kind.BROADCAST, group=(2,), root=0),
        torch=OF_FIRST_RANKS[Kind.BROADCAST],
        gradients=lambda given: [[np.zeros_like(each[0])] for each in given],
        reason="the rank within the group is compared with the source's global rank: wrong numbers (pytorch #130515)",
    ),
    Difference(
        name="nn.gather in a group of later ranks",
        derivative=_derivative(Form.NN, Kind.GATHER, group=(1, 2), root=0),
        text="gather_list",
        reason="the rank within the group is compared with the destination's global rank",
    ),
    Difference(
        name="nn.scatter in a group of later ranks",
        derivative=_derivative(Form.NN, Kind.SCATTER, group=(1, 2), root=0),
        text="scatter_list|Argument",
        reason="the rank within the group is compared with the source's global rank",
    ),
    *(
        Difference(
            name=f"nn.{kind.value} in a group of later ranks",
            derivative=_derivative(Form.NN, kind, group=(1, 2)),
            text="not part of group",
            reason="over gloo parts are exchanged by scatters, whose sources are given as ranks within the group",
        )
        for kind in (Kind.ALL_TO_ALL, Kind.ALL_GATHER)
    ),
)

UNEVEN = (
    Derivative(form=Form.NN, case=Case(kind=Kind.REDUCE_SCATTER, group=(0, 1), shape=(2,), rows=((1, 3), (1, 3)), op="sum")),
    Derivative(form=Form.NN, case=Case(kind=Kind.ALL_TO_ALL, group=(0, 1), shape=(2,), rows=((1, 2), (3, 1)))),
)
"""Parts of different sizes: the first call gathers its gradients as if they had equal sizes, the other has no forward either."""
