"""Sequence parallelism, with and without explicit gradient reduction for norms."""

from __future__ import annotations

import spmd_types as spmd
from spmd_types import I, P, R, S, V
from torch.nn import functional

from typed.parts import COLUMNS_AND_ROWS, ROWS, SEQUENCE, WIDTH, Block, copied, numbers
from typed.program import Program, harmless, wrong

GATHERED = "(normed, tp, src=S(1), dst=R)"
SCATTERED = "spmd.reduce_scatter(part, tp, src=P, dst=S(1))"


def sequence(m, batch, optimizer, tp):
    """Norms compute on a part of the positions."""
    whole, targets = batch
    optimizer.zero_grad()
    x, target = spmd.convert(whole, tp, src=R, dst=S(1)), spmd.convert(targets, tp, src=R, dst=S(1))
    normed = functional.layer_norm(x, (WIDTH,), copied(m.norm.weight, tp), copied(m.norm.bias, tp))
    entered = spmd.all_gather(normed, tp, src=S(1), dst=R)
    hidden = functional.gelu(functional.linear(entered, m.up.weight, m.up.bias))
    part = functional.linear(hidden, m.down.weight)
    left = spmd.reduce_scatter(part, tp, src=P, dst=S(1))
    own = functional.mse_loss(x + left + copied(m.down.bias, tp), target)
    loss = spmd.all_reduce(own / tp.size(), tp, src=V, dst=I)
    loss.backward()
    optimizer.step()
    return loss


SEQUENCE_PARALLEL = Program(
    name="MLP, sequence parallel",
    step=sequence,
    model=Block,
    batches=numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, WIDTH)),
    loss=functional.mse_loss,
    mesh={"tp": 2},
    replicated={"tp": I},
    cuts=COLUMNS_AND_ROWS,
    changes=(
        wrong("the gradient of the norm's weight is local", ("copied(m.norm.weight, tp)", "m.norm.weight")),
        wrong("the gradient of the row bias is local", ("copied(m.down.bias, tp)", "m.down.bias")),
        wrong("the gather does not sum gradients", (GATHERED, "(normed, tp, src=S(1), dst=I)")),
        wrong(
            "the row bias is added before the sum",
            (" + copied(m.down.bias, tp)", ""),
            ("m.down.weight)", "m.down.weight, copied(m.down.bias, tp))"),
        ),
        wrong("means over shards are summed", ("own / tp.size()", "own")),
        wrong("the gradient of the loss is summed as well", ("src=V, dst=I)\n    loss.", "src=V, dst=R)\n    loss.")),
        wrong("targets belong to other positions", ("spmd.convert(targets,", "spmd.convert(targets.flip(1),")),
        wrong("shards are gathered in another order", (GATHERED, "(normed, tp, src=S(1), dst=R).flip(1)")),
        wrong(
            "a shard is taken instead of a sum",
            (SCATTERED, "part.chunk(tp.size(), 1)[tp.rank()]"),
        ),
        harmless(
            "all-reduce and split instead of reduce-scatter",
            (
                SCATTERED,
                "spmd.convert(spmd.all_reduce(part, tp, src=V, dst=I), tp, src=I, dst=S(1))",
            ),
        ),
        harmless(
            "positions are gathered and scattered as rows",
            ("(normed, tp, src=S(1)", "(normed, tp, src=S(0)"),
            ("src=P, dst=S(1)", "src=P, dst=S(0)"),
        ),
    ),
)


def sequence_by_hand(m, batch, optimizer, tp):
    """Norm gradients are summed after backward, as in Megatron."""
    whole, targets = batch
    optimizer.zero_grad()
    x, target = spmd.convert(whole, tp, src=R, dst=S(1)), spmd.convert(targets, tp, src=R, dst=S(1))
    entered = spmd.all_gather(m.norm(x), tp, src=S(1), dst=R)
    hidden = functional.gelu(functional.linear(entered, m.up.weight, m.up.bias))
    left = spmd.reduce_scatter(functional.linear(hidden, m.down.weight), tp, src=P, dst=S(1))
    loss = functional.mse_loss(x + left + m.down.bias, target) / tp.size()
    spmd.reinterpret(loss, tp, src=V, dst=P).backward()
    for parameter in (*m.norm.parameters(), m.down.bias):
        parameter.grad = spmd.all_reduce(parameter.grad, tp, src=P, dst=R)
    optimizer.step()
    return spmd.all_reduce(loss.detach(), tp, src=V, dst=R)


SEQUENCE_BY_HAND = Program(
    name="MLP, sequence parallel, explicit norm reduction",
    step=sequence_by_hand,
    model=Block,
    batches=SEQUENCE_PARALLEL.batches,
    loss=functional.mse_loss,
    mesh={"tp": 2},
    replicated={"tp": R},
    cuts=COLUMNS_AND_ROWS,
    changes=(
        wrong("gradients of norms are not summed", ("(*m.norm.parameters(), m.down.bias)", "(m.down.bias,)")),
        wrong("the gradient of the row bias is not summed", ("(*m.norm.parameters(), m.down.bias)", "m.norm.parameters()")),
        wrong("gradients of norms are averaged", ("(parameter.grad, tp", "(parameter.grad / tp.size(), tp")),
        wrong("gradients of sharded weights are summed as well", ("(*m.norm.parameters(), m.down.bias)", "m.parameters()")),
        wrong(
            "they are summed after the update",
            ("    optimizer.step()\n", ""),
            ("    for parameter in", "    optimizer.step()\n    for parameter in"),
        ),
    ),
)

PROGRAMS = (SEQUENCE_PARALLEL, SEQUENCE_BY_HAND)
