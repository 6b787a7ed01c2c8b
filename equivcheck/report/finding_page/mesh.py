"""Draws the mesh with its ranks, and lists each parameter's placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equivcheck.layouts.base.partition import axes_of_shards, shard_dim
from equivcheck.scenario import FSDP1, Layout, Mesh, Model, Parallelism, Pipeline, ShardingStrategy
from equivcheck.scenario.noun import changed_fields
from equivcheck.scenario.scenario import count
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.worlds.failure import Failure

WIDTH, HEIGHT, GAP, PANEL_GAP, LEFT, TOP, LETTER = 58, 44, 8, 26, 74, 26, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBox:
    """Box that stands for a rank in the mesh's drawing."""

    rank: int
    """Global rank."""
    x: int
    """Left edge, in SVG units."""
    y: int
    """Upper edge, in SVG units."""
    is_wrong: bool
    """Whether the first difference or failure is on this rank."""
    words: str
    """The rank's state if it failed; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDrawing:
    """The mesh as a drawing.

    The last axis is horizontal, the axis before it is vertical, and a third axis gives separate panels.
    """

    boxes: tuple[RankBox, ...]
    """Boxes for the ranks, in order."""
    across: str
    """Name and size for the axis that runs across."""
    down: str
    """Name and size for the axis that runs down; empty if there is only one axis."""
    panels: str
    """Name and size for the axis that makes panels; empty if there are fewer than three axes."""
    width: int
    """Width in SVG units."""
    height: int
    """Height in SVG units."""


def draw_mesh(mesh: Mesh, wrong: Collection[int], failure: Failure | None) -> MeshDrawing:
    """Draw the mesh. Ranks in `wrong` are marked, and failed ranks show their state."""
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
    """How a layout shards one parameter, for a row in a table."""

    name: str
    """The parameter's name in the model without wrappers."""
    shape: str
    """The parameter's full shape."""
    by: tuple[str, ...]
    """The parameter's placement under each parallelism, outermost first."""
    held: str
    """Local shapes on the ranks; empty if unknown."""


def placements(layout: Layout, model: Model, held: Mapping[str, tuple[str, ...]]) -> list[Placement]:
    """Return how the layout shards each parameter. `held` contains each parameter's local shapes, one for each rank."""
    return [
        Placement(
            name=parameter.full_name,
            shape=" x ".join(map(str, parameter.shape)) or "scalar",
            by=tuple(_cut(layout, parallelism, parameter) for parallelism in reversed(layout.parallelisms)),
            held=_grouped(held.get(parameter.full_name, ())),
        )
        for parameter in parameters_of(model)
    ]


def _cut(layout: Layout, parallelism: Parallelism, parameter: Parameter) -> str:
    if isinstance(parallelism, Pipeline):
        return "on its stage's rank"
    if isinstance(parallelism, FSDP1) and parallelism.strategy is not ShardingStrategy.NO_SHARD:
        return "part of a flat parameter"
    dim, axes = shard_dim(parallelism, parameter), axes_of_shards(layout, parallelism, parameter)
    over = f" over {' x '.join(axes)}" if len(axes) > 1 else ""
    return "replicated" if dim is None else f"sharded on dim {dim}{over}"


def _grouped(held: Sequence[str]) -> str:
    """Format local shapes: ``ranks 0, 1: 2 x 3; rank 2: 1 x 3``, or one shape ``on every rank``."""
    if len(set(held)) <= 1:
        return f"{held[0]} on every rank" if held else ""
    ranks: dict[str, list[str]] = {}
    for rank, words in enumerate(held):
        ranks.setdefault(words, []).append(str(rank))
    return "; ".join(f"{'ranks' if len(of) > 1 else 'rank'} {', '.join(of)}: {words}" for words, of in ranks.items())


def options(layout: Layout) -> list[tuple[str, str]]:
    """Return each parallelism in the layout, outermost first, with its axes and the options that differ from defaults."""
    rows = []
    for parallelism in reversed(layout.parallelisms):
        axes = layout.axes_of(parallelism)
        settings = ", ".join(f"{name}={value}" for name, value in changed_fields(parallelism))
        over = f"over {' x '.join(axes)} ({count(layout.mesh.size(*axes), 'rank')})"
        rows.append((parallelism.tag, f"{over}{': ' + settings if settings else ''}"))
    execution = ", ".join(f"{name}={value}" for name, value in changed_fields(layout.execution))
    return [*rows, ("execution", execution)] if execution else rows
