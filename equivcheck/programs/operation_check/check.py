"""`check_operation`: runs a user's operation under several input placements and returns a row for each."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.judge import ExpectedRun, judge, judge_failure
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.operation_check.placements import all_placements, given_placements
from equivcheck.programs.operation_check.reference import reference_of
from equivcheck.programs.operation_check.result import OperationResult, PlacementRow
from equivcheck.programs.operation_check.run import OperationRun, Placements, clear_caches, run_on_rank
from equivcheck.programs.operation_check.task import Function, OperationTask, invalid
from equivcheck.programs.run.reference import NUM_CONFIRMING, NUM_COPIES
from equivcheck.scenario.mesh import MAX_AXES
from equivcheck.system.tally import record_check
from equivcheck.worlds.dtensor_rules import preserved_sharding_rules
from equivcheck.worlds.failure import RanksFailed, RankState
from equivcheck.worlds.pool import MAX_LOCAL_RANKS, WORLDS_WITH_DATA, on_first_rank, ranks
from equivcheck.worlds.ranks import Ranks, Run, rerun_if_died
from equivcheck.worlds.state.keeper import StateKeeper, preserved_state
from equivcheck.worlds.world import World, unwrap_world

NAME = "check_operation"
"""Name under which checks are counted, in place of a layout name."""


def check_operation(  # noqa: PLR0913 - options, all by keyword
    function: Function,
    inputs: Sequence[Any] | Callable[[torch.Generator], Sequence[Any]],
    *,
    placements: Iterable[Any] | None = None,
    on_ranks: Callable[[DeviceMesh], Function] | None = None,
    mesh: Mapping[str, int] | int = 2,
    reductions: Sequence[str] = ("sum",),
    gradients: bool = True,
    dtype: torch.dtype | None = torch.float64,
    seeds: Sequence[int] = (0,),
    setup: Callable[[], Any] | None = None,
    refuses: str = "",
    world: str | Ranks | World = "sim",
    deadline: float = 60.0,
) -> OperationResult:
    """Find the placements under which an operation on DTensors computes the same as on one device.

    It is meant for custom operations with `register_sharding`, functions under `local_map`, and any `autograd.Function`. One
    device calls ``function(*inputs)`` with plain tensors, and every rank calls it with DTensors. The check compares the results
    (tensors, numbers, or tuples, lists and dicts of them) and the gradient for each floating-point input. If ranks need another
    function, `on_ranks` takes the mesh and returns it.

    `inputs` contains full tensors with any shape, and other arguments, which are passed unchanged. It may also be a function that
    takes a `torch.Generator` and draws these inputs, once for each seed in `seeds`. The seeds also seed torch before each call.
    Floating-point tensors are converted to `dtype`, unless it is None; tolerances follow the dtype.

    Each entry in `placements` has an item for each tensor: a placement (``Shard(0)``, or the text ``"S(0)"``, ``"R"``,
    ``"P(sum)"``), a tuple of them if the mesh has several axes, or None for a plain tensor. By default all placements are
    checked, with `Partial` for each reduction in `reductions`. `mesh` maps axis names to sizes, or is the size if there is one
    axis. With ``gradients=False``, nothing is differentiated, and the inputs after the call are compared, too.

    If every rank refuses a placement with a clear error, its outcome is UNSUPPORTED, shown as "refused". Clear errors come from
    DTensor and `local_map`, are a `NotImplementedError`, or match the regular expression `refuses`. Any other error is CRASHED.
    `setup` is called first in each process, for example to register sharding rules. The check removes these rules when it ends.
    In ``gloo``, ranks are other processes, so they only know rules in modules that they import. A custom operation cannot be sent
    to these processes: pass a function that calls it. Ranks that do not communicate for `deadline` seconds count as hung.

    The result has a row for each placement, and failures on ranks are rows too. Raises `UsageError` for invalid arguments. Errors
    on one device are raised unchanged.
    """
    started = time.perf_counter()
    tasks = [
        OperationTask(
            function=_callable("function", function),
            on_ranks=on_ranks if on_ranks is None else _callable("on_ranks", on_ranks),
            setup=setup if setup is None else _callable("setup", setup),
            inputs=(values := _inputs(inputs, seed, dtype)),
            names=_names(function, len(values)),
            mesh=_mesh(mesh),
            gradients=gradients,
            refuses=refuses,
            seed=seed,
        )
        for seed in seeds
    ]
    if not tasks:
        raise invalid("seeds ()", "nothing to check", "at least one seed")
    listed = list(placements) if placements is not None else None
    place = unwrap_world(world)
    with preserved_state(StateKeeper()):
        rows, used = on_first_rank(place, lambda: _checked(tasks, listed, reductions, place, deadline))
    first = tasks[0]
    return OperationResult(
        name=getattr(function, "__name__", type(function).__name__),
        inputs=tuple(name for name, _ in first.tensors),
        mesh=first.mesh,
        world=used,
        rows=rows,
        seconds=time.perf_counter() - started,
    )


def _checked(
    tasks: Sequence[OperationTask], listed: list[Any] | None, reductions: Sequence[str], world: str | Ranks, deadline: float
) -> tuple[tuple[PlacementRow, ...], str]:
    members = _members(tasks[0], world)
    rows: list[PlacementRow] = []
    with preserved_sharding_rules():
        members.run(clear_caches, deadline=deadline)
        if tasks[0].setup is not None:
            tasks[0].setup()
        for task in tasks:
            chosen = all_placements(task, reductions) if listed is None else given_placements(task, listed)
            own = task if members.has_copies else replace(task, setup=None)
            judge_of_task = _Judge(own, members, deadline)
            rows += [judge_of_task.row(each) for each in chosen]
        members.run(clear_caches, deadline=deadline)
    return tuple(rows), members.name


def _members(task: OperationTask, world: str | Ranks) -> Ranks:
    if isinstance(world, Ranks) and world.size != task.num_ranks:
        raise invalid("world", f"it has {world.size} ranks", f"{task.num_ranks}, as in the mesh")
    members = world if isinstance(world, Ranks) else ranks(world, task.num_ranks)
    if not members.has_data:
        raise invalid(f"world {members.name!r}", "it computes no values", ", ".join(WORLDS_WITH_DATA))
    return members


class _Judge:
    """Compares ranks with the single-device run, which is computed once."""

    def __init__(self, task: OperationTask, members: Ranks, deadline: float) -> None:
        self.task, self.members, self.deadline = task, members, deadline
        self.reference = reference_of(task, NUM_COPIES)

    def row(self, placements: Placements) -> PlacementRow:
        started = time.perf_counter()
        row = PlacementRow(outcome=Outcome.EQUIVALENT, world=self.members.name, placements=placements, seed=self.task.seed)
        row = self._judged(row)
        record_check(NAME, row.world, row.outcome.value)
        return replace(row, seconds=time.perf_counter() - started)

    def _judged(self, row: PlacementRow) -> PlacementRow:
        try:
            left: Sequence[OperationRun] = self._run(row.placements, raises=False).values
        except RanksFailed as error:
            failure = self._refused_by_some(row.placements) if error.failure.hung else None
            return judge_failure(row, (failure or error).failure)
        refusals = tuple(each.refusal for each in left)
        if any(refusals):
            return _refused(row, refusals)
        traces = tuple(each.trace for each in left)
        case = ExpectedRun(
            reference=lambda: self.reference,
            confirming_reference=lambda: reference_of(self.task, NUM_CONFIRMING),
            required_steps=1,
        )
        return judge(replace(row, outputs=left[0].outputs), case, RanksResult(run=Run(values=traces)))[0]

    def _refused_by_some(self, placements: Placements) -> RanksFailed | None:
        """If ranks hang, let refusals raise, and return the failure if that ends a rank."""
        try:
            self._run(placements, raises=True)
        except RanksFailed as error:
            states = {report.state for report in error.failure.reports}
            return error if RankState.RAISED in states else None
        return None

    def _run(self, placements: Placements, *, raises: bool) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rerun_if_died(
                lambda: self.members.run(run_on_rank, self.task, placements, raises, deadline=self.deadline, is_user_code=True)
            )


def _refused(row: PlacementRow, refusals: tuple[str, ...]) -> PlacementRow:
    """Return a row with outcome UNSUPPORTED (shown as "refused") if all ranks raise the same error type, else CRASHED."""
    kinds = {each.partition(":")[0] for each in refusals}
    if len(kinds) == 1:
        return replace(row, outcome=Outcome.UNSUPPORTED, reason=refusals[0])
    rank, text = next((number, each) for number, each in enumerate(refusals) if each)
    others = [number for number, each in enumerate(refusals) if each.partition(":")[0] != text.partition(":")[0]]
    return replace(row, outcome=Outcome.CRASHED, reason=f"rank {rank} raises {text}, ranks {others} do not")


def _callable(name: str, given: Any) -> Any:
    if not callable(given):
        raise invalid(f"{name} {given!r:.100}", "it cannot be called", "a callable")
    return given


def _inputs(given: Any, seed: int, dtype: torch.dtype | None) -> tuple[Any, ...]:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise invalid(f"dtype {dtype!r}", "it is not a floating-point dtype", "torch.float64, for example, or None")
    found = given(torch.Generator().manual_seed(seed)) if callable(given) else given
    if not isinstance(found, (tuple, list)) or not any(isinstance(each, torch.Tensor) for each in found):
        raise invalid(f"inputs {found!r:.100}", "no tensor found", "a tuple or list with at least one tensor")
    return tuple(_converted(each, dtype) if isinstance(each, torch.Tensor) else each for each in found)


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    plain = tensor.detach().contiguous()
    return plain.to(dtype) if dtype is not None and plain.is_floating_point() else plain


def _names(function: Any, count: int) -> tuple[str, ...]:
    """Return the function's parameter names, if the signature is known."""
    try:
        parameters = [each.name for each in inspect.signature(function).parameters.values() if each.kind < each.VAR_POSITIONAL]
    except (TypeError, ValueError):
        parameters = []
    return tuple(parameters[number] if number < len(parameters) else f"input {number}" for number in range(count))


def _mesh(given: Any) -> tuple[tuple[str, int], ...]:
    axes = {"axis": given} if isinstance(given, int) else given
    expected = (
        f'a number of ranks up to {MAX_LOCAL_RANKS}, or 1 to {MAX_AXES} axis sizes of at least 1 such as {{"dp": 2, "tp": 2}}'
    )
    if not isinstance(axes, Mapping) or not 1 <= len(axes) <= MAX_AXES:
        raise invalid(f"mesh {given!r}", f"it needs 1 to {MAX_AXES} axes", expected)
    for name, size in axes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise invalid(f"mesh {given!r}", f"axis {name!r} has the size {size!r}", expected)
    return tuple(axes.items())
