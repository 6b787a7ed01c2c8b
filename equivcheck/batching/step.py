"""`Step`: the arguments of `check_batching`, after they were checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.arrangements.arrangement import Constraints
from equivcheck.arrangements.collating import require_collated
from equivcheck.arrangements.examples import examples_of, opaque_examples
from equivcheck.arrangements.format import Format, format_of
from equivcheck.arrangements.rows import Example, Side
from equivcheck.batching.normalisers import NORMALISERS
from equivcheck.batching.ranks import RankRuns
from equivcheck.batching.usage import invalid
from equivcheck.user.task import Loss, Task, data_axes_of, leave_unchanged, loss_axes_of, mesh_of, with_mesh
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.world import World, unwrap_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The arguments of `check_batching`, after they were checked."""

    model: Any
    """The model, or a function that builds it."""
    step: Callable[..., Any]
    """Function that trains one step on a list of microbatches."""
    batch: Any
    """The user's batch."""
    optimizer: Callable[[list[Any]], Any] | None
    """Function that returns an optimizer for a list of parameters; None for SGD."""
    loss: Loss | None
    """Loss function, passed to `step`."""
    evaluate: Callable[[nn.Module, list[Any]], Any] | None
    """Function that returns the loss over a list of batches; None if there is no evaluation."""
    name: str
    """Name in the verdict's first line."""
    normaliser: str | None
    """Declared rule for how examples weigh: ``token``, ``sequence`` or ``none``. None if the step may have any."""
    window: int | None
    """Number of microbatches in an update; None if any number is possible."""
    microbatches: str
    """``even`` if each microbatch needs the same number of rows, else ``any``."""
    microbatch_loss: tuple[str, ...]
    """Names of loss terms that the rows in a microbatch share."""
    packing: str | Callable[[list[Any]], Any] | None
    """How documents in one row are marked; None if rows are not packed."""
    padding_side: tuple[str, ...]
    """Sides on which rows may be padded."""
    pad_id: int
    """Token id in padding."""
    ignore_index: int
    """Label that does not count in the loss."""
    fields: Mapping[str, str]
    """Roles of tensors in the batch, such as ``loss_mask``, as the user gave them."""
    dtype: torch.dtype | None
    """Element type to which model and batch are converted; None to leave them unchanged."""
    keep_dtype: bool
    """Whether the model gets `dtype` if it asks for float32."""
    examples: Callable[[Any], Sequence[Any]] | None
    """Function that takes a batch apart into examples; None to do this by rows."""
    collate: Callable[[list[Any]], Any] | None
    """Function that makes a batch from examples; None to do this by rows."""
    weight: Callable[[Any], float] | None
    """Function that returns an example's weight in the loss; None for equal weights."""
    seed: int
    """Seed for torch, NumPy and random."""
    explain: bool
    """Whether to search for the cause if an arrangement differs."""
    mesh: Mapping[str, int] | None
    """Axis names and sizes; None for one device only."""
    parallelize: Callable[..., Any] | None
    """Function that parallelizes a model over the mesh; None for one device only."""
    rank_step: Callable[..., Any] | None
    """Function that replaces `step` on ranks; None for `step` itself."""
    data_axes: tuple[str, ...] | None
    """Axes whose ranks get different rows; None for axes with usual names."""
    world: str | Ranks | World
    """World in which ranks run, or ranks that are already running."""
    schedule_seed: int
    """Seed for the order in which simulated ranks take turns."""
    deadline: float
    """Seconds after which ranks count as hung."""

    def __post_init__(self) -> None:
        if self.normaliser is not None and self.normaliser not in NORMALISERS:
            raise invalid(f"normaliser {self.normaliser!r}", "it does not exist", f"{', '.join(NORMALISERS)}, or None")
        if self.microbatches not in ("any", "even"):
            raise invalid(
                f"microbatches {self.microbatches!r}",
                "it is neither 'any' nor 'even'",
                "'even' if microbatches need equal sizes, else 'any'",
            )
        if self.window is not None and self.window < 1:
            raise invalid(f"window {self.window}", "it counts the microbatches in an update", "at least 1, or None")
        if (self.examples is None) != (self.collate is None):
            given, missing = ("examples", "collate") if self.collate is None else ("collate", "examples")
            raise invalid(
                f"{given} without {missing}",
                "one takes your batch apart, the other makes new batches",
                "both functions, or neither",
            )
        if self.examples is not None and self.packing is not None:
            raise invalid(
                "packing together with examples", "it is not known which tokens each of your examples has", "packing=None"
            )
        if (self.mesh is None) != (self.parallelize is None):
            given, missing = ("mesh", "parallelize") if self.parallelize is None else ("parallelize", "mesh")
            raise invalid(
                f"{given} without {missing}", "training on ranks needs both", "both, or neither to check on one device only"
            )
        sides = [side.value for side in Side]
        for side in self.padding_side:
            if side not in sides:
                raise invalid(
                    f"padding_side {self.padding_side!r}",
                    f"there is no side {side!r}",
                    f"a tuple of sides, each {' or '.join(sides)}",
                )

    @property
    def constraints(self) -> Constraints:
        """The facts about the step that decide which arrangements must agree."""
        return Constraints(
            window=self.window,
            needs_even=self.microbatches == "even",
            has_microbatch_terms=bool(self.microbatch_loss),
            sides=tuple(Side(side) for side in self.padding_side),
        )

    def taken_apart(self) -> tuple[Format, Sequence[Example]]:
        """Split the user's batch into examples.

        Returns a description of the batch (its tensors and their roles) and the examples.
        """
        if self.examples is not None and self.collate is not None:
            found = opaque_examples(self.batch, self.examples, self.weight)
            require_collated(self.batch, self.collate([each.value for each in found]), found)
            return Format(batch=self.batch, fields=(), pad_id=0, ignore_index=0, packing=None, collate=self.collate), found
        given = format_of(
            self.batch, fields=self.fields, pad_id=self.pad_id, ignore_index=self.ignore_index, packing=self.packing
        )
        return given, examples_of(given)

    def task(self) -> Task:
        """Return a training with one step on one device."""
        return Task(
            name=self.name,
            model=partial(copy.deepcopy, self.model) if isinstance(self.model, nn.Module) else self.model,
            parallelize=leave_unchanged,
            mesh=(("dp", 1),),
            batches=([],),
            loss=_no_loss if self.loss is None else self.loss,
            optimizer=_sgd if self.optimizer is None else self.optimizer,
            step=self.step,
            rank_step=self.step,
            data_axes=("dp",),
            loss_axes=(),
            dtype=self.dtype,
            keep_dtype=self.keep_dtype,
            seed=self.seed,
        )

    def ranks(self) -> RankRuns | None:
        """Return a runner for the step on ranks; None without a mesh."""
        if self.mesh is None or self.parallelize is None:
            return None
        axes = mesh_of(self.mesh)
        rows = data_axes_of(axes, self.data_axes, user_shards=False)
        task = replace(
            self.task(),
            parallelize=self.parallelize,
            mesh=axes,
            data_axes=rows,
            loss_axes=loss_axes_of(axes, rows, knows_rows=True),
            step=with_mesh(self.step, None),
            rank_step=with_mesh(self.rank_step or self.step, None),
        )
        return RankRuns(task=task, world=unwrap_world(self.world), schedule_seed=self.schedule_seed, deadline=self.deadline)


def _sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _no_loss(outputs: Any, targets: Any) -> torch.Tensor:  # noqa: ARG001 - the form of a loss
    raise invalid("loss None", "`step` calls `loss`", "a function loss(outputs, targets)")
