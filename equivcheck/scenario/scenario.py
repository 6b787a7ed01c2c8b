"""Training x Layout: the only thing that a failure needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from equivcheck.scenario.case import Case
from equivcheck.scenario.layout import Layout
from equivcheck.scenario.mesh import Mesh
from equivcheck.scenario.model import Model
from equivcheck.scenario.noun import noun, refuse, require_between
from equivcheck.scenario.training import Training


@noun
class Resume:
    """A checkpoint that a scenario resumes from: it is saved after first steps under another layout."""

    layout: Layout
    """How the steps before the checkpoint are spread, over any number of ranks."""
    steps: int = 1
    """Steps before the checkpoint, at least 1 and fewer than the training has."""
    flatten_optimizer_state_dict: bool = False
    """Whether optimizer state and settings are saved by parameter on one level, as `StateDictOptions` calls it."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise refuse(self, "steps", "at least 1")


@noun
class Scenario:
    """One training, one way to spread it, one interleaving of the ranks."""

    training: Training
    """What is trained."""
    layout: Layout
    """How it is spread."""
    schedule_seed: int = 0
    """Which order simulated ranks run in, 0 to 2**32 - 1; 0 is lowest rank first."""
    resume: Resume | None = None
    """The checkpoint that it resumes from; None where one layout runs all steps."""

    def __post_init__(self) -> None:
        require_between(self, "schedule_seed", 0, 2**32 - 1)
        if self.resume is not None and self.resume.steps >= self.training.steps:
            raise refuse(self.resume, "steps", f"fewer than the {self.training.steps} of the training")

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts in the order in which they run."""
        return (self.layout,) if self.resume is None else (self.resume.layout, self.layout)

    @property
    def name(self) -> str:
        """The names of the layouts in that order: ``ddp`` or ``ddp -> fsdp2``."""
        return " -> ".join(layout.name for layout in self.layouts)

    @property
    def counted_by(self) -> tuple[str, str]:
        """Its last layout and its optimizer."""
        return self.layout.name, type(self.training.optimizer).__name__

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout that ends it."""
        return self.layout.mesh.num_ranks


@singledispatch
def in_words(case: Case) -> str:
    """For people: ``fsdp2 on 4 ranks, widths 4-8-2, AdamW, 2 microbatches of 4 + 3 rows, 3 steps, float64``."""
    raise TypeError(f"{type(case).__name__} is no case")


@in_words.register
def _(scenario: Scenario) -> str:
    resume = scenario.resume
    first = "" if resume is None else f"{count(resume.steps, 'step')} of {_layout(resume.layout)}, then "
    return f"{first}{_layout(scenario.layout)}, {_training(scenario.training)}"


def _layout(layout: Layout) -> str:
    how = ", compiled" if layout.execution.is_compiled else ", steps traced" if layout.execution.whole_step else ""
    return f"{layout.name} on {_mesh(layout.mesh)}{how}"


def _mesh(mesh: Mesh) -> str:
    if len(mesh.axes) == 1:
        return count(mesh.num_ranks, "rank")
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)


def _training(training: Training) -> str:
    rows = " + ".join(str(rows) for rows in training.data.microbatches)
    parts = (
        *_model(training.model),
        type(training.optimizer).__name__,
        f"{count(len(training.data.microbatches), 'microbatch', 'microbatches')} of {rows} {'row' if rows == '1' else 'rows'}",
        count(training.steps, "step"),
        training.precision.value,
    )
    return ", ".join(parts)


def _model(model: Model) -> Iterator[str]:
    """``sequences of 3 out of 5 tokens``, ``attention-gated_mlp``, ``widths 4-4-4``; of a perceptron its widths alone."""
    if model.length is not None:
        yield f"sequences of {model.length}" + (
            "" if model.source is None else f" out of {count(model.source.vocabulary, 'token')}"
        )
        yield "-".join(layer.tag for layer in model.layers)
    yield f"widths {'-'.join(map(str, model.widths))}"


def count(number: int, one: str, many: str = "") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
