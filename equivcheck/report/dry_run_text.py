"""Prints a dry run's result."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.checking.dry_run.run import DryRun, Holding, RankPlan
from equivcheck.layouts.base.expected_calls.communication import Traffic
from equivcheck.scenario import Mesh
from equivcheck.worlds.trace.stage import Stage


def print_dry_run(console: Console, found: DryRun) -> None:
    """Print a dry run: the ranks' shards, the first rank's collective calls, and differences from the expected values."""
    for part in _parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(found: DryRun) -> Iterator[RenderableType]:
    mesh = found.scenario.layout.mesh
    yield Text.assemble(
        (found.scenario.layout.name, "bold"), f" on {mesh.num_ranks:,} ranks ({_axes(mesh)}), {found.seconds:.2f} s"
    )
    yield _holdings(found.plans)
    yield _totals(found.plans)
    yield _traffic(found.plans[0].traffic)
    if found.problems:
        for problem in found.problems:
            yield Text(problem, style="red")
        return
    small = found.small.layout.mesh
    world = f"a simulated world of {small.num_ranks} ranks ({_axes(small)})"
    if found.unmodelled:
        verified = f"shards are as computed, and there are as many calls as in {world}; not predicted: {found.unmodelled}"
    elif found.remarks:
        verified = "shards are as computed, calls and bytes are as expected"
    else:
        verified = f"shards are as computed, calls and bytes are as expected, and there are as many calls as in {world}"
    yield Text(verified, style="green")
    for remark in found.remarks:
        yield Text(remark, style="dim")


def _axes(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)


def _holdings(plans: tuple[RankPlan, ...]) -> Table:
    table = Table("parameter", "full", *(f"rank {plan.rank:,}" for plan in plans), box=None, pad_edge=False, header_style="bold")
    shapes = {holding.name: holding.shape for plan in plans for holding in plan.holdings}
    held = [{holding.name: holding for holding in plan.holdings} for plan in plans]
    for name, shape in shapes.items():
        table.add_row(name, _shape(shape), *(_held(one.get(name)) for one in held))
    return table


def _held(holding: Holding | None) -> str:
    return "-" if holding is None else _shape(holding.local_shape)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _totals(plans: tuple[RankPlan, ...]) -> Table:
    table = Table("bytes", *(f"rank {plan.rank:,}" for plan in plans), box=None, pad_edge=False, header_style="bold")
    for heading, amounts in (
        ("parameters", [plan.parameter_bytes for plan in plans]),
        ("gradients", [plan.parameter_bytes for plan in plans]),
        ("optimizer state", [plan.optimizer_bytes for plan in plans]),
    ):
        table.add_row(heading, *(f"{amount:,}" for amount in amounts))
    return table


def _traffic(entries: tuple[Traffic, ...]) -> Table:
    """Build a table of the calls in the setup and in the last step, because later steps repeat the last one."""
    table = Table("when", "call", "over", box=None, pad_edge=False, header_style="bold")
    for heading in ("calls", "bytes"):
        table.add_column(heading, justify="right")
    last = max((entry.step for entry in entries), default=0)
    for entry in entries:
        if entry.stage is Stage.SETUP or entry.step == last:
            when = "setup" if entry.stage is Stage.SETUP else f"each step, {entry.stage.value}"
            table.add_row(when, entry.op, entry.axes or "one rank", f"{entry.num_calls:,}", f"{entry.num_bytes:,}")
    return table
