"""The mesh as a drawing, and what each parallelism makes of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equivcheck.layouts.base.partition import cut_dim
from equivcheck.scenario import FSDP1, Layout, Mesh, Model, Parallelism, Pipeline, ShardingStrategy
from equivcheck.scenario.noun import changed
from equivcheck.scenario.scenario import count
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.worlds.failure import Failure

WIDTH, HEIGHT, GAP, PANEL_GAP, LEFT, TOP, LETTER = 58, 44, 8, 26, 74, 26, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBox:
    """A rank of the drawing."""

    rank: int
    """Which."""
    x: int
    """Left edge."""
    y: int
    """Upper edge."""
    is_wrong: bool
    """Whether the first thing that differs or fails is on it."""
    words: str
    """Where it was, where ranks failed; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDrawing:
    """Ranks as rows of boxes: the last axis across, the one before it down, the outermost of three in panels."""

    boxes: tuple[RankBox, ...]
    """In rank order."""
    across: str
    """Name and size of the axis across."""
    down: str
    """Of the axis down; empty for one axis."""
    panels: str
    """Of the axis of panels; empty for fewer than three."""
    width: int
    """Of the drawing."""
    height: int
    """Of the drawing."""


def drawn_mesh(mesh: Mesh, wrong: Collection[int], failure: Failure | None) -> MeshDrawing:
    """With some ranks marked as wrong, and where each was if they failed."""
    states = {} if failure is None else {report.rank: report.state.value for report in failure.reports}
    boxes = tuple(_box(mesh, rank, wrong, states) for rank in range(mesh.num_ranks))
    named = [f"{axis.name} {axis.size}" for axis in reversed(mesh.axes)]
    across, down, panels = (*named, "", "")[:3]
    return MeshDrawing(
        boxes=boxes,
        across=across,
        down=down,
        panels=panels,
        width=max(LEFT + LETTER * len(f"{panels}, then {across} →"), *(box.x + WIDTH + 2 for box in boxes)),
        height=max(box.y for box in boxes) + HEIGHT + 2,
    )


def _box(mesh: Mesh, rank: int, wrong: Collection[int], states: Mapping[int, str]) -> RankBox:
    *panel, row, column = (0, 0, *mesh.coordinate(rank))[-3:]
    panel_width = mesh.shape[-1] * (WIDTH + GAP) + PANEL_GAP
    return RankBox(
        rank=rank,
        x=LEFT + panel[0] * panel_width + column * (WIDTH + GAP),
        y=TOP + row * (HEIGHT + GAP),
        is_wrong=rank in wrong,
        words=states.get(rank, ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A parameter under a layout."""

    name: str
    """Canonical name."""
    shape: str
    """Of the whole."""
    by: tuple[str, ...]
    """What each parallelism makes of it, outermost first."""
    held: str
    """What ranks hold of it; empty where that is not known."""


def placements(layout: Layout, model: Model, held: Mapping[str, tuple[str, ...]]) -> list[Placement]:
    """A row for each parameter; `held` has what each rank holds of it."""
    return [
        Placement(
            name=parameter.full_name,
            shape=" x ".join(map(str, parameter.shape)) or "scalar",
            by=tuple(_cut(parallelism, parameter) for parallelism in reversed(layout.parallelisms)),
            held=_grouped(held.get(parameter.full_name, ())),
        )
        for parameter in parameters_of(model)
    ]


def _cut(parallelism: Parallelism, parameter: Parameter) -> str:
    if isinstance(parallelism, Pipeline):
        return "on the rank of its stage"
    if isinstance(parallelism, FSDP1) and parallelism.strategy is not ShardingStrategy.NO_SHARD:
        return "a run of a flat parameter"
    dim = cut_dim(parallelism, parameter)
    return "whole" if dim is None else f"cut along dim {dim}"


def _grouped(held: Sequence[str]) -> str:
    """``ranks 0, 1: 2 x 3; rank 2: 1 x 3``, or only what all have."""
    if len(set(held)) <= 1:
        return f"{held[0]} on every rank" if held else ""
    ranks: dict[str, list[str]] = {}
    for rank, words in enumerate(held):
        ranks.setdefault(words, []).append(str(rank))
    return "; ".join(f"{'ranks' if len(of) > 1 else 'rank'} {', '.join(of)}: {words}" for words, of in ranks.items())


def options(layout: Layout) -> list[tuple[str, str]]:
    """Each parallelism, outermost first, with the axes that it takes and what is not at its default."""
    rows = []
    for parallelism in reversed(layout.parallelisms):
        axes = layout.axes_of(parallelism)
        settings = ", ".join(f"{name}={value}" for name, value in changed(parallelism))
        over = f"over {' x '.join(axes)} ({count(layout.mesh.size(*axes), 'rank')})"
        rows.append((parallelism.tag, f"{over}{': ' + settings if settings else ''}"))
    execution = ", ".join(f"{name}={value}" for name, value in changed(layout.execution))
    return [*rows, ("execution", execution)] if execution else rows
