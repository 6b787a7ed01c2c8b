"""Runs `check_optimizer`: checks each case as a training, shrinks the first finding, and explains it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.tally import record_check
from equivcheck.user.judging import check_task
from equivcheck.user.optimizer_check.cases import (
    OptimizerCase,
    Placed,
    drawn_cases,
    place_parameters,
    smaller_cases,
    take_step,
)
from equivcheck.user.optimizer_check.causes import cause_of
from equivcheck.user.optimizer_check.result import CaseResult, OptimizerVerdict
from equivcheck.user.resuming.restart import Restart
from equivcheck.user.task import Task, mesh_of, with_mesh
from equivcheck.user.usage import invalid, named_in_errors
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.world import World

API = "check_optimizer"
_invalid = partial(invalid, api=API)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCheck:
    """The arguments for `check_optimizer`, after they were checked."""

    optimizer: Callable[..., Any]
    """Function that builds the optimizer on a rank."""
    reference: Callable[..., Any]
    """Function that builds the optimizer on one device."""
    mesh: Mapping[str, int]
    """Axis names and sizes."""
    placements: tuple[str, ...]
    """Ways in which ranks hold parameters, as values of `Placed`."""
    parallelize: Callable[..., Any] | None
    """Function for distributing the parameters; None to use `placements`."""
    shapes: Mapping[str, tuple[int, ...]] | None
    """Names and shapes of all parameters; None to draw them."""
    num_cases: int
    """How many cases are drawn."""
    steps: int
    """How many steps each case has."""
    save: Callable[..., Any] | None
    """Function for saving the optimizer's state; None to copy it in memory."""
    load: Callable[..., Any] | None
    """Function for loading the optimizer's state; None if `save` is None."""
    name: str
    """Name in the verdict's first line."""
    dtype: torch.dtype | None
    """Element type for parameters and gradients."""
    seed: int
    """Seed for shapes, parameters and gradients."""
    world: str | Ranks | World
    """World in which ranks run, or ranks that are already running."""
    schedule_seed: int
    """Seed for the order in which simulated ranks take turns."""
    deadline: float
    """Seconds after which ranks count as hung."""
    explain: bool
    """Whether to shrink the first differing case, and to search for its cause."""

    def __post_init__(self) -> None:
        values = [each.value for each in Placed if each is not Placed.BY_USER]
        for placement in self.placements:
            if placement not in values:
                raise _invalid(
                    f"placements {self.placements!r}",
                    f"the placement {placement!r} does not exist",
                    f"values from {', '.join(values)}",
                )
        if self.shapes is not None and not self.shapes:
            raise _invalid(
                "shapes {}", "the optimizer gets no parameter", "a shape for each parameter name, or None for random shapes"
            )
        scalar = next((name for name, shape in (self.shapes or {}).items() if not tuple(shape)), None)
        if scalar is not None and Placed.FSDP2.value in self.placements and self.parallelize is None:
            raise _invalid(
                f"shapes {scalar!r}",
                "fully_shard refuses parameters without dims",
                "shapes with at least one dim, or placements without fsdp2",
            )
        if not self.placements:
            raise _invalid("placements ()", "it gives no way to hold parameters", f"at least one of {', '.join(values)}")
        for name, value in (("cases", self.num_cases), ("steps", self.steps)):
            if value < 1:
                raise _invalid(f"{name} {value}", "nothing would be checked", "at least 1")
        if (self.save is None) != (self.load is None):
            raise _invalid(
                "save without load" if self.load is None else "load without save",
                "half of the cases save a checkpoint and load it, which needs both",
                "both, or neither",
            )

    def run(self) -> OptimizerVerdict:
        """Check all cases, and return the verdict."""
        started = time.perf_counter()
        with named_in_errors(API):
            verdict = self._checked()
        record_check(API, verdict.world, verdict.outcome.value)
        return replace(verdict, seconds=time.perf_counter() - started)

    def _checked(self) -> OptimizerVerdict:
        results, found = [], []
        for case in self._cases():
            verdict = self._check(case)
            found.append(verdict)
            results.append(CaseResult(case=case, outcome=verdict.outcome, reason=verdict.reason))
        worst = max(verdict.worst_error for verdict in found)
        shown = OptimizerVerdict(
            outcome=Outcome.EQUIVALENT,
            world=found[0].world,
            mesh=mesh_of(self.mesh),
            name=self.name,
            results=tuple(results),
            worst_error=worst,
        )
        wrong = next((number for number, verdict in enumerate(found) if verdict.outcome.is_finding), None)
        if wrong is None:
            undecided = next((each for each in found if each.outcome is not Outcome.EQUIVALENT), None)
            return shown if undecided is None else replace(shown, outcome=undecided.outcome, reason=undecided.reason)
        case, verdict = self._shrunk(results[wrong].case, found[wrong]) if self.explain else (results[wrong].case, found[wrong])
        return replace(
            shown,
            outcome=verdict.outcome,
            reason=verdict.reason,
            divergence=verdict.divergence,
            followers=verdict.followers,
            num_unnamed=verdict.num_unnamed,
            failure=verdict.failure,
            worst_error=verdict.worst_error,
            case=case,
            cause=self._cause((case, verdict), (results[wrong].case, found[wrong])) if self.explain else "",
        )

    def _cause(self, *cases: tuple[OptimizerCase, UserVerdict]) -> str:
        """Return the cause found in the first case that has one.

        One parameter may be too few, for example if that parameter is the one without an update.
        """
        causes = (cause_of(self._task(case), case, verdict, self._check_task) for case, verdict in cases)
        return next(filter(None, causes), "")

    def _cases(self) -> list[OptimizerCase]:
        placements = [Placed(value) for value in self.placements] if self.parallelize is None else [Placed.BY_USER]
        drawn = drawn_cases(self.num_cases, placements, self.steps, self.seed)
        if self.shapes is None:
            return drawn
        given = tuple((name, tuple(shape)) for name, shape in self.shapes.items())
        return [replace(case, shapes=given) for case in drawn]

    def _check(self, case: OptimizerCase) -> UserVerdict:
        return self._check_task(self._task(case))

    def _check_task(self, task: Task) -> UserVerdict:
        return check_task(task, self.world, self.schedule_seed, self.deadline, explain=False)

    def _shrunk(self, case: OptimizerCase, verdict: UserVerdict) -> tuple[OptimizerCase, UserVerdict]:
        """Shrink a case while its outcome and the phase that differs first stay the same."""
        checked = ((smaller, self._check(smaller)) for smaller in smaller_cases(case))
        found = next((each for each in checked if _kind_of(each[1]) == _kind_of(verdict)), None)
        return (case, verdict) if found is None else self._shrunk(*found)

    def _task(self, case: OptimizerCase) -> Task:
        """Return the case as a training without a model or a loss."""
        axes = mesh_of(self.mesh)
        resume = None
        if case.saved_after is not None:
            state: dict[int, Any] = {}
            save, load = self.save or partial(_keep, state), self.load or partial(_restore, state)
            resume = Restart(after=case.saved_after, save=save, load=load)
        return Task(
            name=self.name,
            model=case.model,
            parallelize=partial(place_parameters, placed=case.placed) if self.parallelize is None else self.parallelize,
            mesh=axes,
            batches=tuple(case.gradients()),
            loss=_no_loss,
            optimizer=with_mesh(self.reference, None),
            rank_optimizer=self.optimizer,
            step=take_step,
            rank_step=take_step,
            data_axes=(),
            loss_axes=(),
            shard=_all,
            dtype=self.dtype,
            resume=resume,
            seed=self.seed,
        )


def _kind_of(verdict: UserVerdict) -> tuple[Outcome, Phase | None]:
    return verdict.outcome, None if verdict.divergence is None else verdict.divergence.phase


def _all(batch: Any, mesh: Any) -> Any:  # noqa: ARG001 - the form of `shard`
    """Return the full gradients, because every rank gets all of them."""
    return batch


def _no_loss(outputs: Any, targets: Any) -> torch.Tensor:  # noqa: ARG001 - the form of a loss
    raise AssertionError("check_optimizer trains without a loss, but its step has called the loss function")


def _keep(state: dict[int, Any], model: nn.Module, optimizer: Any, _scheduler: Any, _folder: Path) -> None:
    """Keep copies of parameters and optimizer state in this process."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state[dist.get_rank()] = parameters, copy.deepcopy(optimizer.state_dict())


def _restore(state: dict[int, Any], model: nn.Module, optimizer: Any, _scheduler: Any, _folder: Path) -> None:
    parameters, optimizer_state = state[dist.get_rank()]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    optimizer.load_state_dict(copy.deepcopy(optimizer_state))
