"""Tensor parallelism for a perceptron and a vocabulary."""

from __future__ import annotations

import spmd_types as spmd
import torch
from spmd_types import I, R, V
from torch.nn import functional

from typed.parts import COLUMNS_AND_ROWS, ROWS, WIDTH, Block, Words, copied, numbers, words
from typed.program import Program, harmless, wrong

SUM = "spmd.all_reduce(part, tp, src=V, dst=I)"
DENOMINATOR = "spmd.all_reduce((logits - highest[:, None]).exp().sum(-1), tp, src=V, dst=I)"
HIGHEST = "spmd.all_gather(logits.amax(-1), tp, src=V, dst=R).amax(0)"


def perceptron(m, batch, optimizer, tp):
    """Columns, then rows."""
    x, target = batch
    optimizer.zero_grad()
    normed = m.norm(x)
    entered = copied(normed, tp)
    hidden = functional.gelu(functional.linear(entered, m.up.weight, m.up.bias))
    part = functional.linear(hidden, m.down.weight)
    left = spmd.all_reduce(part, tp, src=V, dst=I)
    loss = functional.mse_loss(x + left + m.down.bias, target)
    loss.backward()
    optimizer.step()
    return loss


PERCEPTRON = Program(
    name="MLP, tensor parallel",
    step=perceptron,
    model=Block,
    batches=numbers((ROWS, WIDTH), (ROWS, WIDTH)),
    loss=functional.mse_loss,
    mesh={"tp": 2},
    replicated={"tp": I},
    cuts=COLUMNS_AND_ROWS,
    changes=(
        wrong("copy-to is missing", ("copied(normed, tp)", "normed")),
        wrong("the sum over ranks is missing", (SUM, "part")),
        wrong("the gradient of the sum is summed as well", ("dst=I", "dst=R")),
        wrong("the sum is taken twice", ("(part, tp,", "(spmd.all_reduce(part, tp, src=V, dst=R), tp,")),
        wrong("the mean over ranks is used instead of the sum", ("(part, tp,", "(part / tp.size(), tp,")),
        wrong("the row bias is added before the sum", ("m.down.weight)", "m.down.weight, m.down.bias)"), (" + m.down.bias", "")),
        wrong(
            "the row bias is copied and added before the sum",
            ("m.down.weight)", "m.down.weight, copied(m.down.bias, tp))"),
            (" + m.down.bias", ""),
        ),
        wrong(
            "the residual is copied and added before the sum", ("(part, tp,", "(part + copied(x, tp), tp,"), ("x + left", "left")
        ),
        wrong("a weight is detached", ("m.up.weight", "m.up.weight.detach()")),
        wrong("gradients are not zeroed", ("    optimizer.zero_grad()\n", "")),
        harmless(
            "the row bias is copied, and divided among ranks before the sum",
            ("m.down.weight)", "m.down.weight, copied(m.down.bias, tp) / tp.size())"),
            (" + m.down.bias", ""),
        ),
        harmless(
            "copy-to comes before the norm, also for its weights",
            ("m.norm(x)", "functional.layer_norm(x, (WIDTH,), copied(m.norm.weight, tp), copied(m.norm.bias, tp))"),
            ("copied(normed, tp)", "normed"),
        ),
        harmless("the sum is written as a gather", (SUM, "spmd.all_gather(part, tp, src=V, dst=I).sum(0)")),
        harmless("the sum bypasses autograd", (SUM, "part + (spmd.all_reduce(part, tp, src=V, dst=R) - part).detach()")),
    ),
)


def vocabulary(m, batch, optimizer, tp):
    """Vocabulary-parallel embedding and cross entropy."""
    tokens, targets = batch
    optimizer.zero_grad()
    first, count = tp.rank() * len(m.head.weight), len(m.head.weight)
    own = tokens - first
    mine = (own >= 0) & (own < count)
    rows = functional.embedding(own * mine, m.embedding.weight) * mine[:, None]
    x = torch.tanh(spmd.all_reduce(rows, tp, src=V, dst=I))
    logits = functional.linear(copied(x, tp), m.head.weight)
    with torch.no_grad():
        highest = spmd.all_gather(logits.amax(-1), tp, src=V, dst=R).amax(0)
    total = spmd.all_reduce((logits - highest[:, None]).exp().sum(-1), tp, src=V, dst=I)
    wanted = targets - first
    here = (wanted >= 0) & (wanted < count)
    chosen = spmd.all_reduce(logits.gather(-1, (wanted * here)[:, None])[:, 0] * here, tp, src=V, dst=I)
    loss = (total.log() + highest - chosen).mean()
    loss.backward()
    optimizer.step()
    return loss


VOCABULARY_PARALLEL = Program(
    name="vocabulary parallel",
    step=vocabulary,
    model=Words,
    batches=words(),
    loss=functional.cross_entropy,
    mesh={"tp": 2},
    replicated={"tp": I},
    cuts={"*": ((0, "tp"),)},
    changes=(
        wrong("the largest logit is local", (HIGHEST, "logits.amax(-1)")),
        wrong("rows of other ranks' tokens are not masked", (" * mine[:, None]", "")),
        wrong("logits of other ranks' targets are not masked", ("[:, 0] * here", "[:, 0]")),
        wrong("the first token is the next rank's", ("tp.rank() * len", "(tp.rank() + 1) % tp.size() * len")),
        wrong("the embedding is not summed", ("spmd.all_reduce(rows, tp, src=V, dst=I)", "rows")),
        wrong("the denominator is local", (DENOMINATOR, "(logits - highest[:, None]).exp().sum(-1)")),
        wrong("copy-to is missing before the head", ("copied(x, tp)", "x")),
        wrong(
            "the gradient of the denominator is summed as well",
            ("exp().sum(-1), tp, src=V, dst=I)", "exp().sum(-1), tp, src=V, dst=R)"),
        ),
        wrong("the loss uses half of the targets", ("chosen).mean()", "chosen)[: len(targets) // 2].mean()")),
        harmless(
            "the embedding's sum is copied immediately",
            ("(rows, tp, src=V, dst=I)", "(rows, tp, src=V, dst=R)"),
            ("copied(x, tp)", "x"),
        ),
        wrong(
            "the largest logit is not subtracted, so large ones overflow",
            (" - highest[:, None]", ""),
            (" + highest", ""),
        ),
    ),
)

PROGRAMS = (PERCEPTRON, VOCABULARY_PARALLEL)
