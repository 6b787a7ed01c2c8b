"""A scenario in words, one line."""

from __future__ import annotations

from equivcheck.scenario import Layout, Mesh, Scenario, Training


def in_words(scenario: Scenario) -> str:
    """For people: ``fsdp2 on 4 ranks, widths 4-8-2, AdamW, 2 microbatches of 4 + 3 rows, 3 steps, float64``."""
    resume = scenario.resume
    first = "" if resume is None else f"{count(resume.steps, 'step')} of {_layout(resume.layout)}, then "
    return f"{first}{_layout(scenario.layout)}, {_training(scenario.training)}"


def _layout(layout: Layout) -> str:
    return f"{layout.name} on {_mesh(layout.mesh)}"


def _mesh(mesh: Mesh) -> str:
    if len(mesh.axes) == 1:
        return count(mesh.num_ranks, "rank")
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)


def _training(training: Training) -> str:
    widths = "-".join(str(width) for width in (training.model.features, *(layer.width for layer in training.model.layers)))
    rows = " + ".join(str(rows) for rows in training.data.microbatches)
    parts = (
        f"widths {widths}",
        type(training.optimizer).__name__,
        f"{count(len(training.data.microbatches), 'microbatch', 'microbatches')} of {rows} {'row' if rows == '1' else 'rows'}",
        count(training.steps, "step"),
        training.precision.value,
    )
    return ", ".join(parts)


def count(number: int, one: str, many: str = "") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
