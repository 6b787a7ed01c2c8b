"""Runs operations on ranks, and records their results' placements, dtypes, strides and shard sizes."""

from __future__ import annotations

import random
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from equivcheck.programs.nouns import Constant, Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.nouns.operations.operation import Shape
from equivcheck.programs.nouns.placement import REDUCTIONS, REPLICATE, partial, shard
from equivcheck.programs.nouns.program import arguments_of
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.rank import DTensorTarget, placement_text
from equivcheck.programs.run.values import full_tensor
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks

SECONDS = 1.0
"""Deadline for programs that run only for their results."""
NUM_PROGRAMS = 8
"""Programs to run for each operation's results. Another seed selects others."""
MAX_OUTPUTS = 10
"""Maximum number of results from which a statement can select."""
SHAPES: tuple[Shape, ...] = ((4, 6), (5, 3), (2, 3, 4))
"""Shapes of the tensors that are redistributed."""
_SIZES = re.compile(r", torch\.Size\(.*\), \d+")
"""Sizes in the text of a placement with masked rows. They are dropped, because nothing depends on them."""
_OF_LEAVES = re.compile(r"R|S\(\d+\)|P\((sum|avg|max)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSpec:
    """Everything about an operation's result, except its values, that may affect the next operation."""

    placements: tuple[str, ...]
    """The result's placements, as torch prints them."""
    dtype: str
    """The dtype's name, without ``torch.``."""
    num_dims: int
    """How many dims the full tensor has."""
    sizes: frozenset[str]
    """``uneven`` or ``empty shard``, if this is so on ranks."""
    memory: frozenset[str]
    """Texts about unusual strides and missing gradients."""

    @property
    def kind(self) -> tuple[tuple[str, ...], str]:
        """The result's placements and dtype."""
        return self.placements, self.dtype

    @property
    def can_be_leaf(self) -> bool:
        """Whether an input of a tensor program, called a leaf, can have the result's placements and dtype.

        If so, a sweep over single operations already passes such arguments, so the second operation gets nothing new.
        """
        return self.dtype == "float64" and all(map(_OF_LEAVES.fullmatch, self.placements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of an operation, with the program that computes it."""

    program: TensorProgram
    """Program whose last statement computes the result."""
    spec: ResultSpec
    """The result's placements, dtype, sizes and strides on ranks."""
    shape: Shape
    """The full tensor's shape."""

    @property
    def name(self) -> str:
        """Name of the operation that computed the result, such as ``softmax``.

        For other statements, it is the statement's kind.
        """
        last = self.program.statements[-1]
        return last.name if isinstance(last, Operation) else last.tag


def first_programs(sweep: Sweep, seed: int = 0) -> Iterator[TensorProgram]:
    """Yield the programs whose results become arguments of second operations.

    For each operation in the sweep, `seed` selects a few programs at random. The last programs redistribute a leaf, between any
    two placements.
    """
    by_operation: dict[str, list[TensorProgram]] = defaultdict(list)
    for program in sweep.programs():
        by_operation[program.operations[-1]].append(program)
    for name, programs in by_operation.items():
        yield from random.Random(f"{seed} {name}").sample(programs, min(NUM_PROGRAMS, len(programs)))
    for shape in SHAPES:
        placements = list(product([REPLICATE, *map(shard, range(len(shape)))], repeat=len(sweep.mesh)))
        sources = [*placements, *(((partial(each),) * len(sweep.mesh)) for each in REDUCTIONS)]
        for source, target in product(sources, placements):
            yield TensorProgram(
                mesh=sweep.mesh, statements=(Leaf(shape=shape, placements=source), Redistribution(placements=target))
            )


def results_on(members: Ranks, programs: Iterable[TensorProgram]) -> Iterator[Result]:
    """Run the programs on ranks, and yield all their results. If ranks fail, the program is skipped.

    The results are not compared with one device.
    """
    for program in programs:
        try:
            run = members.run(_on_rank, program, deadline=SECONDS, is_user_code=False)
        except RanksFailed:
            continue
        for output, parts in enumerate(zip(*run.values, strict=False)):
            found = [each for each in parts if each is not None]
            if len(found) == len(parts):
                yield _result(_with_output(program, output), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A result on one rank."""

    spec: ResultSpec
    shape: Shape
    part: Shape


def _result(program: TensorProgram, parts: list[_Part]) -> Result:
    """Merge all ranks' properties: a property counts if it holds on any rank."""
    memory = frozenset[str]().union(*(each.spec.memory for each in parts))
    uneven = {"uneven"} if len({each.part for each in parts}) > 1 else set[str]()
    empty = {"empty shard"} if any(0 in each.part for each in parts) else set[str]()
    spec = replace(parts[0].spec, memory=memory, sizes=frozenset(uneven | empty))
    return Result(program=program, spec=spec, shape=parts[0].shape)


def _with_output(program: TensorProgram, output: int) -> TensorProgram:
    last = program.statements[-1]
    if not output or not isinstance(last, Operation):
        return program
    return replace(program, statements=(*program.statements[:-1], replace(last, output=output)))


def _on_rank(program: TensorProgram) -> tuple[_Part | None, ...]:
    """Return the last statement's results, None for a plain tensor; empty if the statement is refused."""
    target, values = DTensorTarget(program), list[torch.Tensor]()
    found: tuple[torch.Tensor, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for statement in program.statements:
            taken = [values[len(values) - back] for back in arguments_of(statement)]
            if isinstance(statement, (Leaf, Constant)):
                found = (target.distribute(full_tensor(statement), statement.placements),)
                values.append(found[0].requires_grad_() if isinstance(statement, Leaf) else found[0])
            elif isinstance(statement, Redistribution):
                found = (target.redistribute(taken[0], statement.placements),)
            elif isinstance(statement, Operation):
                found = _called(statement, taken)
    return tuple(map(_part, found[:MAX_OUTPUTS]))


def _called(statement: Operation, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    try:
        return results_of(statement.name, arguments, statement.dim)
    except Exception:  # DTensor or one device refuses the call
        return ()


def _part(value: Any) -> _Part | None:
    if not isinstance(value, DTensor):
        return None
    spec = ResultSpec(
        placements=tuple(_SIZES.sub("", placement_text(each)) for each in value.placements),
        dtype=str(value.dtype).removeprefix("torch."),
        num_dims=value.ndim,
        sizes=frozenset(),
        memory=frozenset(_memory(value)),
    )
    return _Part(spec=spec, shape=tuple(value.shape), part=tuple(value.to_local().shape))


def _memory(value: DTensor) -> Iterator[str]:
    part = value.to_local()
    if not value.is_contiguous():
        yield "not contiguous"
    if part.is_contiguous() != value.is_contiguous():
        yield "other strides than the shard"
    if part.storage_offset():
        yield "shard begins within its storage"
    if not value.requires_grad:
        yield "no gradient"
