"""Expert parallelism and context parallelism."""

from __future__ import annotations

import spmd_types as spmd
import torch
from spmd_types import I, P, R, S, V
from torch.nn import functional

from typed.parts import ROWS, SEQUENCE, WIDTH, Attention, Experts, attended, copied, numbers, rotated
from typed.program import Program, harmless, wrong

BALANCE = 0.5


def with_balance(outputs, target):
    """Single-device step with the balance loss."""
    done, unbalanced = outputs
    return functional.mse_loss(done, target) + BALANCE * unbalanced


def of_whole_batch(model, batch, optimizer, loss):
    """Single-device step whose loss is no mean over rows."""
    optimizer.zero_grad()
    value = with_balance(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value


def experts(m, batch, optimizer, ep):
    """Each rank has one expert. All rows go to all ranks, with zeros for rows that another expert gets."""
    x, target = batch
    optimizer.zero_grad()
    chances = (x @ copied(m.router, ep)).softmax(-1)
    mask = functional.one_hot(chances.argmax(-1), ep.size()).to(x.dtype)
    arrived = spmd.all_to_all(x * mask.T[..., None], ep, src=V, dst=V)
    done = torch.tanh(arrived @ m.experts[0])
    back = spmd.all_to_all(done, ep, src=V, dst=V)
    out = (back * (chances * mask).T[..., None]).sum(0)
    load = spmd.all_reduce(mask.mean(0) / ep.size(), ep, src=V, dst=R)
    loss = functional.mse_loss(out, target) + BALANCE * (load * chances.mean(0)).sum()
    spmd.reinterpret(loss / ep.size(), ep, src=V, dst=P).backward()
    optimizer.step()
    return loss


EXPERTS = Program(
    name="expert parallel",
    step=experts,
    model=Experts,
    batches=numbers((4 * ROWS, WIDTH), (4 * ROWS, WIDTH)),
    loss=with_balance,
    mesh={"ep": 2},
    replicated={"ep": I},
    cuts={"experts": ((0, "ep"),)},
    data_axes=("ep",),
    alone=of_whole_batch,
    changes=(
        wrong("the gradient of the router is local", ("copied(m.router, ep)", "m.router")),
        wrong("the load is local", ("spmd.all_reduce(mask.mean(0) / ep.size(), ep, src=V, dst=R)", "mask.mean(0)")),
        wrong("loads are summed instead of averaged", ("mask.mean(0) / ep.size()", "mask.mean(0)")),
        wrong("results are not sent back", ("spmd.all_to_all(done, ep, src=V, dst=V)", "done")),
        wrong("results are sent back in another order", ("(done, ep,", "(done.flip(0), ep,")),
        wrong("experts of all rows are summed", ("x * mask.T", "x * torch.ones_like(mask).T"), ("(chances * mask)", "chances")),
        wrong("results give the router no gradient", ("(chances * mask).T", "(chances.detach() * mask).T")),
        wrong(
            "gradients of experts are averaged again", ("optimizer.step()", "m.experts.grad /= ep.size()\n    optimizer.step()")
        ),
        wrong(
            "gradients of experts are summed over ranks",
            ("optimizer.step()", "m.experts.grad = spmd.all_reduce(m.experts.grad, ep, src=V, dst=R)\n    optimizer.step()"),
        ),
        wrong(
            "an expert takes at most three rows from a rank",
            (".to(x.dtype)\n", ".to(x.dtype)\n    mask = mask * (mask.cumsum(0) <= 3)\n"),
        ),
        wrong("rows go to the wrong expert", ("x * mask.T", "x * mask.flip(1).T"), ("* mask).T", "* mask.flip(1)).T")),
        wrong(
            "an expert takes at most seven rows from a rank",
            (".to(x.dtype)\n", ".to(x.dtype)\n    mask = mask * (mask.cumsum(0) <= 7)\n"),
        ),
        harmless(
            "all rows go to all experts, and results are selected afterwards",
            (" * mask.T[..., None]", " * torch.ones_like(mask).T[..., None]"),
        ),
        harmless("results are not masked, because experts map zeros to zeros", ("(chances * mask)", "chances")),
    ),
)


def counted_loss(out, target):
    """Mean over positions that count."""
    counts = (target[..., 0] > 0).to(target.dtype)
    return ((out - target).square().mean(-1) * counts).sum() / counts.sum()


def context(m, batch, optimizer, cp):
    """Each rank has a part of the positions, and gathers keys and values."""
    whole, targets = batch
    optimizer.zero_grad()
    x, target = spmd.convert(whole, cp, src=R, dst=S(1)), spmd.convert(targets, cp, src=R, dst=S(1))
    everywhere = torch.arange(whole.shape[1])
    positions = spmd.convert(everywhere, cp, src=R, dst=S(0))
    query, key, value = (x @ copied(each, cp) for each in m.parameters())
    keys = spmd.all_gather(rotated(key, positions), cp, src=S(1), dst=R)
    values = spmd.all_gather(value, cp, src=S(1), dst=R)
    out = attended(rotated(query, positions), keys, values, positions[:, None] >= everywhere)
    counts = (target[..., 0] > 0).to(target.dtype)
    number = spmd.all_reduce(counts.sum(), cp, src=V, dst=R)
    own = ((out - target).square().mean(-1) * counts).sum() / number
    loss = spmd.all_reduce(own, cp, src=V, dst=I)
    loss.backward()
    optimizer.step()
    return loss


CONTEXT = Program(
    name="context parallel",
    step=context,
    model=Attention,
    batches=numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, WIDTH)),
    loss=counted_loss,
    mesh={"cp": 2},
    replicated={"cp": I},
    cuts={},
    changes=(
        wrong(
            "positions of the rotation are local",
            ("rotated(key, positions)", "rotated(key, everywhere[: x.shape[1]])"),
            ("rotated(query, positions)", "rotated(query, everywhere[: x.shape[1]])"),
        ),
        wrong("positions of the mask are local", ("positions[:, None] >=", "everywhere[: x.shape[1], None] >=")),
        wrong(
            "the mask has ranks in another order",
            ("positions[:, None] >= everywhere", "positions[:, None] >= everywhere.roll(x.shape[1])"),
        ),
        wrong(
            "keys and values are local",
            ("spmd.all_gather(rotated(key, positions), cp, src=S(1), dst=R)", "rotated(key, positions)"),
            ("spmd.all_gather(value, cp, src=S(1), dst=R)", "value"),
            (">= everywhere", ">= positions"),
        ),
        wrong("gathering values does not sum gradients", ("(value, cp, src=S(1), dst=R)", "(value, cp, src=S(1), dst=I)")),
        wrong("gathered keys have no gradient", ("rotated(key, positions), cp", "rotated(key, positions).detach(), cp")),
        wrong(
            "values are gathered in another order",
            ("(value, cp, src=S(1), dst=R)", "(value, cp, src=S(1), dst=R).roll(x.shape[1], 1)"),
        ),
        wrong("gradients of weights are local", ("copied(each, cp)", "each")),
        wrong("the loss divides by the local number of positions, and averages", (" / number", " / counts.sum() / cp.size()")),
        wrong(
            "the gradient of the loss is local and averaged",
            ("loss.backward()", "(spmd.reinterpret(own, cp, src=V, dst=P) / cp.size()).backward()"),
        ),
        harmless("backward starts from the local part of the loss", ("loss.backward()", "own.backward()")),
    ),
)

PROGRAMS = (EXPERTS, CONTEXT)
