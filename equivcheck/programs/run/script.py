"""Writes a tensor program as a script that needs only torch and exits with 1 if ranks differ from one device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import reduction_of, sharded_dim
from equivcheck.programs.nouns.program import Constant, Leaf, Redistribution, RoundTrip, Statement, TensorProgram, arguments_of
from equivcheck.programs.run import values
from equivcheck.programs.run.calls import source
from equivcheck.programs.run.one_device import plan_of
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.system.printable import escape_unprintable

OPERATION = "op_"
"""Prefix for operation names in scripts, because some, such as `sum`, are Python functions too."""
HEADER = '''"""{title}

    torchrun --standalone --nproc-per-node {num_ranks} {name}

Exit code 1 if ranks differ from one device, else 0.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SHAPE_OF_MESH = {mesh}
'''

TARGETS = '''

class OneDevice:
    """Plain tensors."""

    def tensor(self, full, placements):
        return full.clone()

    def redistribute(self, value, placements):
        return value.clone()

    def round_trip(self, value):
        return value.clone()

    def full(self, value):
        return value


class Ranks:
    """DTensors."""

    def __init__(self, mesh):
        self.mesh = mesh

    def tensor(self, full, placements):
        local = local_part(full, SHAPE_OF_MESH, self.mesh.get_coordinate(), placements)
        return self.from_local(local, placements, full.shape, full.stride())

    def from_local(self, local, placements, shape, stride):
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def redistribute(self, value, placements):
        return value.redistribute(self.mesh, placements)

    def round_trip(self, value):
        return self.from_local(value.to_local(), value.placements, value.shape, value.stride())

    def full(self, value):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if full.shape != value.shape and full.numel() == value.numel():
            raise RuntimeError(f"a DTensor of shape {tuple(value.shape)} has shape {tuple(full.shape)} in full_tensor()")
        return full


def first_of(found, output=0):
    chosen = found[output] if isinstance(found, (tuple, list)) else found
    return chosen if isinstance(chosen, torch.Tensor) else torch.tensor(chosen)


def local_part(full, mesh, coordinate, placements):
    part = full
    for size, index, placement in zip(mesh, coordinate, placements):
        if placement.is_partial():
            part = partial_value(part, size, index, placement.reduce_op)
    for size, index, placement in zip(mesh, coordinate, placements):
        if isinstance(placement, Shard):
            part = chunk(part, size, index, placement.dim)
    return part.clone()
'''

MAIN = """

def values_and_gradients(target):
    values, leaves, sinks = program(target)
    full = {name: target.full(each) for name, each in values.items()}
    taken = [name for name in sinks if full[name].requires_grad]
    loss = sum((full[name].double() * weights_of(full[name].shape, int(name[1:]))).sum() for name in taken)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    full |= {name: None if each is None else target.full(each) for name, each in gradients.items()}
    return {name: None if each is None else each.detach() for name, each in full.items()}


def differs(expected, found):
    if expected is None or found is None:
        return expected is not found
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return True
    return not torch.allclose(expected.double(), found.double(), rtol=1e-9, atol=1e-9)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    expected = values_and_gradients(OneDevice())
    found = values_and_gradients(Ranks(init_device_mesh("cpu", SHAPE_OF_MESH)))
    wrong = [name for name in expected if differs(expected[name], found[name])]
    for name in wrong if dist.get_rank() == 0 else ():
        print(name, "on one device:", expected[name], "on ranks:", found[name], sep="\\n")
    if dist.get_rank() == 0 and not wrong:
        print("no difference")
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
"""


def script_of_verdict(verdict: ProgramVerdict, *, name: str, seen_on: str) -> str:
    """Return a script for the program in a verdict. The script's title contains the outcome and the torch version `seen_on`.

    If `seen_on` is empty, the title names the installed version.
    """
    found = " ".join(escape_unprintable(shorten_to_line(verdict.reason)).split()).replace('"', "'").replace("\\", "/")
    result = f"{verdict.outcome.value} on torch {seen_on or torch.__version__}{': ' if found else ''}{found}"
    return script_of(verdict.program, f"DTensors against the same operations on one device: {result}", name)


def script_of(
    program: TensorProgram, title: str = "DTensors against the same operations on one device.", name: str = "repro.py"
) -> str:
    """Return a script for a tensor program. If ranks refuse a statement, the script ends with torch's exception."""
    functions = [f"\n\n{source(OPERATIONS[each], OPERATION)}\n" for each in dict.fromkeys(program.operations)]
    arithmetic = [f"\n\n{inspect.getsource(each)}" for each in (values.chunk, values.partial_value, values.weights_of)]
    header = HEADER.format(title=title, num_ranks=program.num_ranks, mesh=program.mesh, name=name)
    return "".join([header, *functions, "\n\n", *_program(program), TARGETS, *arithmetic, MAIN])


def _program(program: TensorProgram) -> Iterator[str]:
    plan = plan_of(program)
    yield "def program(target):\n"
    for number, statement in enumerate(program.statements):
        yield f"    v{number} = {_line(number, statement, applies=plan.applies[number])}\n"
    everything = ", ".join(f'"v{number}": v{number}' for number in range(len(program.statements)))
    leaves = ", ".join(f'"v{number}": v{number}' for number, each in enumerate(program.statements) if isinstance(each, Leaf))
    sinks = [f"v{number}" for number in program.sinks()]
    yield f"    return {{{everything}}}, {{{leaves}}}, {sinks}\n"


def _line(number: int, statement: Statement, *, applies: bool) -> str:
    taken = [f"v{number - back}" for back in arguments_of(statement)]
    if isinstance(statement, (Leaf, Constant)):
        made = f"target.tensor({_literal(statement)}, {_placements(statement.placements)})"
        return f"{made}.requires_grad_()" if isinstance(statement, Leaf) else made
    if not applies:
        return f"{taken[0]}.clone()"
    if isinstance(statement, Redistribution):
        return f"target.redistribute({taken[0]}, {_placements(statement.placements)})"
    if isinstance(statement, RoundTrip):
        return f"target.round_trip({taken[0]})"
    dim = [str(statement.dim)] if OPERATIONS[statement.name].takes_dim else []
    output = f", {statement.output}" if statement.output else ""
    return f"first_of({OPERATION}{statement.name}({', '.join([*taken, *dim])}){output})"


def _literal(statement: Leaf | Constant) -> str:
    full = values.full_tensor(statement)
    numbers = full.flatten().tolist()
    return f"torch.tensor({numbers}, dtype={full.dtype}).view({statement.shape})"


def _placements(placements: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_placement, placements))}]"


def _placement(placement: str) -> str:
    dim, reduction = sharded_dim(placement), reduction_of(placement)
    if dim is not None:
        return f"Shard({dim})"
    return "Replicate()" if reduction is None else f'Partial("{reduction}")'
