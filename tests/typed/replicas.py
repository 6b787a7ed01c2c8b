"""Explicit data parallelism, alone and over tensor parallelism."""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.distributed as dist  # noqa: F401 - of a change
from spmd_types import I, P, R, V
from torch.nn import functional

from typed.parts import COLUMNS_AND_ROWS, EPSILON, MAX_NORM, ROWS, WIDTH, Block, Matrices, clipping, copied, numbers
from typed.program import Program, harmless, wrong

BATCHES = numbers((2 * ROWS, WIDTH), (2 * ROWS, WIDTH), growth=4)


def replicas(m, batch, optimizer, dp):
    """Two microbatches, then the mean gradient, clipped."""
    rows, targets = batch
    optimizer.zero_grad()
    total = 0
    for x, target in zip(rows.chunk(2), targets.chunk(2), strict=True):
        loss = functional.mse_loss(m(x), target) / 2
        spmd.reinterpret(loss, dp, src=V, dst=P).backward()
        total += loss.detach()
    for parameter in m.parameters():
        parameter.grad = spmd.all_reduce(parameter.grad / dp.size(), dp, src=P, dst=R)
    norm = torch.stack([parameter.grad.square().sum() for parameter in m.parameters()]).sum().sqrt()
    for parameter in m.parameters():
        parameter.grad *= (MAX_NORM / (norm + EPSILON)).clamp(max=1)
    optimizer.step()
    return total


MEAN = "spmd.all_reduce(parameter.grad / dp.size(), dp, src=P, dst=R)"
REDUCTION = f"    for parameter in m.parameters():\n        parameter.grad = {MEAN}\n"
NORM = "    norm = torch.stack([parameter.grad.square().sum() for parameter in m.parameters()]).sum().sqrt()\n"
CLIPPING = "    for parameter in m.parameters():\n        parameter.grad *= (MAX_NORM / (norm + EPSILON)).clamp(max=1)\n"
ACCUMULATED = "        total += loss.detach()\n"
IN_LOOP = "        for parameter in m.parameters():\n            parameter.grad = " + MEAN + "\n"
SENT = "    for parameter in m.parameters():\n        dist.broadcast(parameter.detach(), 0, group=dp)\n"

REPLICAS = Program(
    name="explicit data parallel",
    step=replicas,
    model=Matrices,
    batches=BATCHES,
    loss=functional.mse_loss,
    mesh={"dp": 2},
    replicated={"dp": R},
    cuts={},
    data_axes=("dp",),
    alone=clipping,
    changes=(
        wrong("gradients are not reduced", (MEAN, "parameter.grad")),
        wrong("gradients are summed instead of averaged", ("grad / dp.size()", "grad")),
        wrong("gradients are reduced twice", (MEAN, f"spmd.all_reduce({MEAN}, dp, src=P, dst=R)")),
        wrong("one parameter is not reduced", (MEAN, f"{MEAN} if parameter is m.first else parameter.grad")),
        wrong(
            "the last microbatch comes after the reduction",
            (REDUCTION, ""),
            (ACCUMULATED, f"{ACCUMULATED}        if x.data_ptr() != rows.data_ptr():\n            break\n{IN_LOOP}"),
        ),
        wrong("microbatches are summed instead of averaged", (", target) / 2", ", target)")),
        wrong(
            "the second microbatch replaces the first", ("        spmd.rein", "        optimizer.zero_grad()\n        spmd.rein")
        ),
        wrong("gradients are clipped before they are reduced", (REDUCTION, ""), (CLIPPING, CLIPPING + REDUCTION)),
        wrong("the norm uses local gradients, before they are reduced", (NORM, ""), (REDUCTION, NORM + REDUCTION)),
        wrong("the norm lacks its square root", (".sum().sqrt()", ".sum()")),
        wrong("the norm counts each replica", ("torch.stack(", "dp.size() ** 0.5 * torch.stack(")),
        wrong(
            "the update comes before the reduction",
            ("    optimizer.step()\n", ""),
            (REDUCTION, "    optimizer.step()\n" + REDUCTION),
        ),
        wrong("gradients of a small norm are scaled up to the limit", (".clamp(max=1)", "")),
        harmless("weights are sent from the first rank after each step", ("optimizer.step()\n", f"optimizer.step()\n{SENT}")),
        harmless("averaged gradients are averaged again", (NORM, REDUCTION + NORM)),
        harmless(
            "accumulated gradients are reduced after each microbatch",
            (REDUCTION, ""),
            (ACCUMULATED, ACCUMULATED + IN_LOOP),
        ),
        harmless(
            "backward starts from the local loss",
            ("spmd.reinterpret(loss, dp, src=V, dst=P).backward()", "loss.backward()"),
        ),
    ),
)


def replicas_of_parts(m, batch, optimizer, dp, tp):
    """Tensor parallelism on two replicas."""
    x, target = batch
    optimizer.zero_grad()
    entered = copied(m.norm(x), tp)
    hidden = functional.gelu(functional.linear(entered, m.up.weight, m.up.bias))
    left = spmd.all_reduce(functional.linear(hidden, m.down.weight), tp, src=V, dst=I)
    loss = functional.mse_loss(x + left + m.down.bias, target)
    spmd.reinterpret(loss / dp.size(), dp, src=V, dst=P).backward()
    for parameter in m.parameters():
        parameter.grad = spmd.all_reduce(parameter.grad, dp, src=P, dst=R)
    optimizer.step()
    return loss


REPLICAS_OF_PARTS = Program(
    name="data parallel over tensor parallel",
    step=replicas_of_parts,
    model=Block,
    batches=BATCHES,
    loss=functional.mse_loss,
    mesh={"dp": 2, "tp": 2},
    replicated={"dp": R, "tp": I},
    cuts=COLUMNS_AND_ROWS,
    data_axes=("dp",),
    changes=(
        wrong("copy-to is over the data axis", ("copied(m.norm(x), tp)", "copied(m.norm(x), dp)")),
        wrong("the sum is over the data axis", ("m.down.weight), tp,", "m.down.weight), dp,")),
        wrong("gradients are reduced over the tensor axis", ("(parameter.grad, dp,", "(parameter.grad, tp,")),
        wrong("the mean is over all ranks", ("loss / dp.size()", "loss / (dp.size() * tp.size())")),
        wrong("gradients of sharded weights are not reduced", ("in m.parameters()", "in (*m.norm.parameters(), m.down.bias)")),
    ),
)

PROGRAMS = (REPLICAS, REPLICAS_OF_PARTS)
