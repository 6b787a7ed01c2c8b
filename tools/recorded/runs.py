"""Records a checked training on one device and on ranks over gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from equivcheck import TraceVerdict, Verdict, check, compare, record
from equivcheck.layouts.base.partition import shard_dim
from equivcheck.scenario import ExpertParallel, ExpertStorage, LocalTensorParallel, Model, Pipeline, Scenario
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.setup import Setup
from equivcheck.training.threads import one_thread
from equivcheck.user.task import Task
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Ranks, Run

NUM_MOVED = 2
"""Default number of moved runs, which measure the noise."""
Options = Mapping[str, Any]
"""Options of `record`."""


class RecordedRanks(Ranks):
    """Ranks over gloo that record their training. They are processes, because a recording watches a whole process."""

    name: ClassVar[str] = "gloo"
    has_copies: ClassVar[bool] = True

    def __init__(self, size: int, folder: Path, options: Options | None = None) -> None:
        super().__init__(size)
        self.folder = folder
        """Folder for the trace."""
        self._options = options or {}
        self.arguments: tuple[Any, ...] = ()
        """Arguments of the program that ran last."""

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Implement `Ranks.run`."""
        self.arguments = arguments
        given: dict[str, Any] = {"schedule_seed": schedule_seed, "deadline": deadline, "is_user_code": is_user_code}
        task = arguments[0] if arguments else None
        declared = {"mesh": dict(task.mesh), "cuts": task.cuts} if isinstance(task, Task) and task.cuts else self._options
        return ranks("gloo", self.size).run(run_recorded, self.folder, declared, program, *arguments, **given)

    def prepare_to_compile(self) -> None:
        """Let the kept processes compile once."""
        ranks("gloo", self.size).prepare_to_compile()

    def close(self) -> None:
        """Does nothing, because the processes are kept."""


def run_recorded(folder: Path, options: Options, program: Callable[..., Any], *arguments: Any) -> Any:
    """Program for a rank: run another one while recording."""
    with record(folder, **options):
        return program(*arguments)


def record_one_device(
    run: Callable[[], object], folder: Path, options: Options | None = None, num_moved: int = NUM_MOVED
) -> list[Path]:
    """Record a training on one device, then its moved runs. Returns their folders."""
    folders = [folder / f"moved{number}" for number in range(num_moved + 1)]
    for number, each in enumerate(folders):
        with one_thread(), record(each, moved=number, **(options or {})):
            run()
    return folders


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoVerdicts:
    """Verdicts on one training, which ran once on ranks."""

    full: Verdict
    """Verdict of `check`, which compares all values."""
    recorded: TraceVerdict
    """Verdict of `compare`, which reads two recordings."""


def check_both(scenario: Scenario, folder: Path, alter: Callable[[Setup], None] | None = None) -> TwoVerdicts:
    """Check a scenario over gloo while recording, and compare the recording with that of one device."""
    layout, training = scenario.layout, scenario.training
    names = {"names": tied_names(training.model)} if layout.has(Pipeline) else {}
    members = RecordedRanks(layout.mesh.num_ranks, folder / "ranks", names | declared_cuts(scenario))
    full = check(scenario, world=members, alter=alter)
    one, *moved = record_one_device(lambda: train(single_device_setup(training)), folder, names)
    return TwoVerdicts(full=full, recorded=compare(one, members.folder, moved=moved))


def tied_names(model: Model) -> dict[str, Any]:
    """Shared weights, as `record` takes them. A stage knows a weight by the name in its own layers."""
    shared = [
        (f"layers.{layer.shares}.linear.weight", f"layers.{index}.linear.weight")
        for index, layer in enumerate(model.layers)
        if layer.shares is not None
    ]
    shared += [("embedding.weight", "head.linear.weight")] if model.head is not None and model.head.tied else []
    return {first: {"tied": [first, *(name for own, name in shared if own == first)]} for first, _ in shared}


def declared_cuts(scenario: Scenario) -> dict[str, Any]:
    """The mesh and the cuts of plain shards, as a user declares them; empty if there are none."""
    layout, found = scenario.layout, dict[str, tuple[tuple[int, str], ...]]()
    for parallelism in layout.parallelisms:
        is_plain = isinstance(parallelism, ExpertParallel) and parallelism.storage is ExpertStorage.PLAIN
        if is_plain or isinstance(parallelism, LocalTensorParallel):
            (axis,) = layout.axes_of(parallelism)
            for parameter in parameters_of(scenario.training.model):
                dim = shard_dim(parallelism, parameter)
                if dim is not None:
                    found[parameter.full_name] = (*found.get(parameter.full_name, ()), (dim, axis))
    return {"mesh": dict(zip(layout.mesh.names, layout.mesh.shape, strict=True)), "cuts": found} if found else {}
