"""Explicit sharding as in FSDP, and Muon on shards."""

from __future__ import annotations

import spmd_types as spmd
import torch
from spmd_types import I, P, R, S, V  # noqa: F401 - of changes
from torch.nn import functional

from typed.parts import EPSILON, MAX_NORM, ROWS, WIDTH, Matrices, clipping, numbers, orthogonalised
from typed.program import Program, harmless, wrong

BATCHES = numbers((2 * ROWS, WIDTH), (2 * ROWS, WIDTH), growth=4)
NORM = "spmd.all_reduce(squares, dp, src=V, dst=R).sqrt()"
TO_OWNERS = "spmd.all_to_all(torch.stack([m.first.grad, m.second.grad]), dp, src=V, dst=V)"
BACK = "spmd.all_to_all(whole.unflatten(0, (dp.size(), -1)), dp, src=V, dst=V)"
OWN = "whole.unflatten(0, (dp.size(), -1))"


def orthogonalising(model, batch, optimizer, loss):
    """Single-device step."""
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for parameter in model.parameters():
        parameter.grad = orthogonalised(parameter.grad)
    optimizer.step()
    return value


def shards(m, batch, optimizer, dp):
    """Rows of each matrix, gathered for forward; clipped."""
    x, target = batch
    optimizer.zero_grad()
    first, second = (spmd.all_gather(each, dp, src=S(0), dst=R) for each in m.parameters())
    loss = functional.mse_loss(torch.tanh(x @ first) @ second, target)
    spmd.reinterpret(loss / dp.size(), dp, src=V, dst=P).backward()
    squares = torch.stack([parameter.grad.square().sum() for parameter in m.parameters()]).sum()
    norm = spmd.all_reduce(squares, dp, src=V, dst=R).sqrt()
    for parameter in m.parameters():
        parameter.grad *= (MAX_NORM / (norm + EPSILON)).clamp(max=1)
    optimizer.step()
    return loss


SHARDS = Program(
    name="explicit sharded data parallel",
    step=shards,
    model=Matrices,
    batches=BATCHES,
    loss=functional.mse_loss,
    mesh={"dp": 2},
    replicated={"dp": R},
    cuts={"*": ((0, "dp"),)},
    data_axes=("dp",),
    alone=clipping,
    changes=(
        wrong("the gather does not sum gradients", ("dst=R) for", "dst=I) for")),
        wrong("gradients are summed instead of averaged", ("loss / dp.size()", "loss")),
        wrong("the norm uses local shards", (NORM, "squares.sqrt()")),
        wrong("norms of shards are summed", (NORM, "spmd.all_reduce(squares.sqrt(), dp, src=V, dst=R)")),
        wrong(
            "the square root is taken of partial sums",
            (NORM, "spmd.all_reduce(spmd.reinterpret(squares, dp, src=V, dst=P).sqrt(), dp, src=P, dst=R)"),
        ),
        wrong("rows are gathered in another order", ("(x @ first)", "(x @ first.roll(1, 0))")),
        wrong(
            "a matrix stays from the first step",
            (
                "    loss = func",
                "    m.kept = getattr(m, 'kept', second.detach())\n    second += (m.kept - second).detach()\n    loss = func",
            ),
        ),
        wrong(
            "the update comes before the clipping",
            ("    optimizer.step()\n", ""),
            ("    squares =", "    optimizer.step()\n    squares ="),
        ),
        harmless(
            "the gather is written as a sum",
            (
                "spmd.all_gather(each, dp, src=S(0), dst=R)",
                "spmd.all_reduce(spmd.convert(each, dp, src=S(0), dst=P, expert_mode=True), dp, src=P, dst=R)",
            ),
        ),
    ),
)


def owners(m, batch, optimizer, dp):
    """Each rank orthogonalises the full gradients of the matrices that it owns, as distributed Muon does."""
    x, target = batch
    optimizer.zero_grad()
    first, second = (spmd.all_gather(each, dp, src=S(0), dst=R) for each in m.parameters())
    loss = functional.mse_loss(torch.tanh(x @ first) @ second, target)
    spmd.reinterpret(loss / dp.size(), dp, src=V, dst=P).backward()
    owned = spmd.all_to_all(torch.stack([m.first.grad, m.second.grad]), dp, src=V, dst=V)
    whole = orthogonalised(owned.flatten(0, 1))
    m.first.grad, m.second.grad = spmd.all_to_all(whole.unflatten(0, (dp.size(), -1)), dp, src=V, dst=V)
    optimizer.step()
    return loss


OWNERS = Program(
    name="distributed Muon",
    step=owners,
    model=Matrices,
    batches=BATCHES,
    loss=functional.mse_loss,
    mesh={"dp": 2},
    replicated={"dp": R},
    cuts={"*": ((0, "dp"),)},
    data_axes=("dp",),
    alone=orthogonalising,
    changes=(
        wrong("each rank orthogonalises its shards", (TO_OWNERS, "torch.stack([m.first.grad, m.second.grad])"), (BACK, OWN)),
        wrong("owners do not send results back", (BACK, OWN)),
        wrong("owners send results in another order", (OWN, "whole.unflatten(0, (dp.size(), -1)).flip(0)")),
        wrong("the full matrix is assembled transposed", ("owned.flatten(0, 1)", "owned.transpose(0, 1).flatten(0, 1)")),
        harmless("gradients are summed instead of averaged, which has the same orthogonal matrix", ("loss / dp.size()", "loss")),
    ),
)


PROGRAMS = (SHARDS, OWNERS)
