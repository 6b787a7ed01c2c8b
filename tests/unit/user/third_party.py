"""A layout and a mutant as a third party would write them; the docs show both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from equivcheck.training.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand(Parallelism):
    """Data parallelism by one all-reduce for each parameter."""

    tag: ClassVar[str] = "by_hand"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = (("dp",),)
    reverse: bool = False
    """Whether the last parameter is reduced first."""


class ByHandKind(LayoutKind[ByHand]):
    """Applies `ByHand`."""

    parallelism = ByHand

    def apply(self, setup: Setup, parallelism: ByHand, mesh: DeviceMesh) -> None:
        """Split rows, and average gradients before the update."""
        import torch.distributed as dist

        from equivcheck.layouts.base.data_rows import take_rows

        step = -1 if parallelism.reverse else 1

        def average(_optimizer: Optimizer, _step: int) -> None:
            for parameter in list(setup.model.parameters())[::step]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.get_group())
                    parameter.grad /= mesh.size()

        take_rows(setup, mesh)
        setup.loss_scale = mesh.size()
        setup.before_update.append(average)


def _double(setup: Setup) -> None:
    """Multiply gradients by two after they have been averaged."""

    def double(_optimizer: Optimizer, _step: int) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2

    setup.before_update.append(double)


DOUBLED = Mutant(
    name="doubled_by_hand",
    wrong="gradients are multiplied by two after they have been averaged",
    family=Family.DATA_PARALLEL,
    layouts=("by_hand",),
    plant=_double,
    causes=(Cause.SUMMED, Cause.SCALED),
    minimum=Minimum(because="two ranks, as there is nothing to average on one"),
)
