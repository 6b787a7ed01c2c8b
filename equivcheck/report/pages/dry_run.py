"""The page of a dry run: bytes by rank, calls by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from equivcheck.checking.dry_run.run import DryRun, RankPlan
from equivcheck.layouts.base.expected_calls.communication import Traffic
from equivcheck.report.frame.charts import stacked
from equivcheck.report.frame.headline import Headline, footer
from equivcheck.report.frame.templates import rendered
from equivcheck.scenario.scenario import count, in_words
from equivcheck.system.output_file import replace_text
from equivcheck.worlds.trace.stage import Stage

_MAX_PARAMETERS = 200
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What a rank holds."""

    rank: str
    """Number and place in the mesh."""
    parts: Mapping[str, int]
    """Bytes of parameters, gradients and optimizer state."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def write_page(file: Path, found: DryRun) -> None:
    """Write the page."""
    held = [_bytes(found, plan) for plan in found.plans]
    most = max(each.total for each in held)
    mesh, traffic = found.scenario.layout.mesh, found.plans[0].traffic
    values = {
        "title": f"equivcheck dry-run: {found.scenario.layout.name} on {count(mesh.num_ranks, 'rank')}",
        "headline": _headline(found),
        "tiles": [
            ("most bytes on a rank", in_units(most)),
            ("calls in a step", f"{sum(each.num_calls for each in traffic if each.step == _last(traffic)):,}"),
            ("sent in a step", in_units(sum(each.num_bytes for each in traffic if each.step == _last(traffic)))),
            ("ranks", f"{mesh.num_ranks:,}"),
        ],
        "facts": [
            ("scenario", in_words(found.scenario)),
            ("mesh", " x ".join(f"{axis.name} {axis.size:,}" for axis in mesh.axes)),
            ("compared", f"calls of a simulated world of {count(found.small.layout.mesh.num_ranks, 'rank')}"),
            ("took", f"{found.seconds:.2f} s"),
        ],
        "footer": footer(),
        "found": found,
        "held": [(each, stacked({f"s{at}": amount for at, amount in enumerate(each.parts.values())}, most)) for each in held],
        "parameters": list(_parameters(found.plans))[:_MAX_PARAMETERS],
        "left_out": max(0, len({name for plan in found.plans for name in _names(plan)}) - _MAX_PARAMETERS),
        "steps": list(_steps(traffic)),
        "most_sent": max((each.num_bytes for each in traffic), default=1) or 1,
        "in_units": in_units,
    }
    replace_text(file, rendered("pages/dry_run.html.jinja", **values))


def in_units(amount: float) -> str:
    """``1.5 MiB``."""
    unit = next(number for number in range(len(_UNITS)) if amount < 1024 ** (number + 1) or number == len(_UNITS) - 1)
    return f"{amount:,.0f} bytes" if not unit else f"{amount / 1024**unit:,.1f} {_UNITS[unit]}"


def _headline(found: DryRun) -> Headline:
    if found.problems:
        return Headline(text=f"not as it should be: {count(len(found.problems), 'difference')}", is_good=False)
    calls = f"calls are not modelled ({found.unmodelled})" if found.unmodelled else "calls and bytes are as expected"
    return Headline(text=f"shards match the arithmetic, {calls}", is_good=True)


def _bytes(found: DryRun, plan: RankPlan) -> RankBytes:
    place = ", ".join(f"{name} {at:,}" for name, at in zip(found.scenario.layout.mesh.names, plan.coordinates, strict=True))
    parts = {"parameters": plan.parameter_bytes, "gradients": plan.parameter_bytes, "optimizer state": plan.optimizer_bytes}
    return RankBytes(rank=f"rank {plan.rank:,} ({place})", parts=parts)


def _names(plan: RankPlan) -> list[str]:
    return [holding.name for holding in plan.holdings]


def _parameters(plans: tuple[RankPlan, ...]) -> Iterator[tuple[str, str, list[str]]]:
    """Name, whole shape, and what each rank has of it."""
    held = [{holding.name: holding for holding in plan.holdings} for plan in plans]
    shapes = {holding.name: holding.shape for plan in plans for holding in plan.holdings}
    for name, shape in shapes.items():
        yield name, _shape(shape), [_shape(rank[name].local_shape) if name in rank else "nothing" for rank in held]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "scalar"


def _steps(traffic: tuple[Traffic, ...]) -> Iterator[tuple[str, list[Traffic]]]:
    """The setup, then each step; the last one is like all that follow."""
    setup = [each for each in traffic if each.stage is Stage.SETUP]
    if setup:
        yield "Setup", setup
    for step in sorted({each.step for each in traffic if each.stage is not Stage.SETUP}):
        later = " and each that follows" if step == _last(traffic) else ""
        yield f"Step {step}{later}", [each for each in traffic if each.step == step and each.stage is not Stage.SETUP]


def _last(traffic: tuple[Traffic, ...]) -> int:
    return max((each.step for each in traffic), default=0)
