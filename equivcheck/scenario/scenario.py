"""Scenario: a training, its layout, and everything else needed to reproduce a failure."""

from __future__ import annotations

from functools import singledispatch

from equivcheck.scenario.case import Checkable
from equivcheck.scenario.layout import Layout
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between
from equivcheck.scenario.training import Training


@frozen_dataclass
class Resume:
    """Checkpoint from which a scenario resumes. It was saved after the first steps, which ran under another layout."""

    layout: Layout
    """Layout for the steps before the checkpoint, with any number of ranks."""
    steps: int = 1
    """Steps before the checkpoint: at least 1, fewer than the training's steps."""
    flatten_optimizer_state_dict: bool = False
    """`flatten_optimizer_state_dict` in `StateDictOptions`: whether optimizer state is saved flat, keyed by parameter name."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise invalid_field(self, "steps", "at least 1")


@frozen_dataclass
class Scenario:
    """A training, its layout, and the order in which simulated ranks run."""

    training: Training
    """Training to run."""
    layout: Layout
    """Distribution over ranks."""
    schedule_seed: int = 0
    """Seed for the order in which simulated ranks run, 0 to 2**32 - 1. With 0 the lowest rank runs first."""
    resume: Resume | None = None
    """Checkpoint to resume from; None if one layout runs all steps."""

    def __post_init__(self) -> None:
        require_between(self, "schedule_seed", 0, 2**32 - 1)
        if self.resume is not None and self.resume.steps >= self.training.steps:
            raise invalid_field(self.resume, "steps", f"fewer steps than the training's {self.training.steps}")

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts in the order in which they run."""
        return (self.layout,) if self.resume is None else (self.resume.layout, self.layout)

    @property
    def name(self) -> str:
        """Names of the layouts in execution order: ``ddp`` or ``ddp -> fsdp2``."""
        return " -> ".join(layout.name for layout in self.layouts)

    @property
    def summary_row(self) -> tuple[str, str]:
        """The last layout's name, and the optimizer's class name."""
        return self.layout.name, type(self.training.optimizer).__name__

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the last layout."""
        return self.layout.mesh.num_ranks


@singledispatch
def describe_case(case: Checkable) -> str:
    """Describe a case: ``fsdp2 on 4 ranks, widths 4-8-2, AdamW, 2 microbatches of 4 + 3 rows, 3 steps, float64``."""
    raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")


@describe_case.register
def _(scenario: Scenario) -> str:
    resume = scenario.resume
    first = "" if resume is None else f"{count(resume.steps, 'step')} of {_layout(resume.layout)}, then "
    training, model = scenario.training, scenario.training.model
    rows = " + ".join(str(rows) for rows in training.data.microbatches)
    rows += " row" if rows == "1" else " rows"
    last = f", {training.data.last_window} in the last step" if training.has_trailing_window else ""
    parts = [first + _layout(scenario.layout)]
    if model.length is not None:
        tokens = "" if model.source is None else f" out of {count(model.source.vocabulary, 'token')}"
        documents = f" in documents of {model.document_length}" if model.packs_documents else ""
        parts += [f"sequences of {model.length}{tokens}{documents}", "-".join(layer.tag for layer in model.layers)]
    parts += [
        f"widths {'-'.join(map(str, model.widths))}",
        type(training.optimizer).__name__,
        f"{count(len(training.data.microbatches), 'microbatch', 'microbatches')} of {rows}{last}",
        count(training.steps, "step"),
        training.precision.value,
    ]
    return ", ".join(parts)


def _layout(layout: Layout) -> str:
    axes = layout.mesh.axes
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in axes) if len(axes) > 1 else count(layout.mesh.num_ranks, "rank")
    how = ", compiled" if layout.execution.is_compiled else ", steps traced" if layout.execution.whole_step else ""
    return f"{layout.name} on {mesh}{how}"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun in singular or plural, such as ``1 rank`` or ``2 ranks``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
