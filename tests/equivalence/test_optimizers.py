"""The property for optimizers that are not elementwise, and that their statistics are those of whole parameters."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck import Outcome, Scenario, check
from equivcheck.scenario import (
    FSDP2,
    SPMD,
    Adafactor,
    Axis,
    Data,
    Distribution,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Muon,
    Optimizer,
    Parallelism,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.strategies import optimizers, scenarios, trainings
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase
from support.fresh import drawn_afresh
from support.supported import require_supported
from support.verdicts import first_divergence

EXAMPLES = max(6, settings().max_examples // 16)


@pytest.mark.parametrize("kind", [Adafactor, Muon])
def test_whole_parameters_are_updated_as_one_device_does(kind: type[Optimizer]) -> None:
    """Norms, means and products over a parameter are those of all of it, wherever its elements lie."""

    @drawn_afresh(scenarios(trainings=trainings(optimizers=optimizers(kinds=st.just(kind))), max_ranks=4), examples=EXAMPLES)
    def equivalent(scenario: Scenario) -> None:
        check(scenario).assert_no_finding()

    equivalent()


def on_local_shards(setup: Setup) -> None:
    """Let the optimizer see the local shards alone."""
    build = setup.build_optimizer

    def built(training: Training, named: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        pairs = list(named)
        shards = [(name, nn.Parameter(local(parameter.detach()))) for name, parameter in pairs]
        seen, alone = build(training, pairs), build(training, shards)

        def step() -> None:
            for (_, parameter), (_, shard) in zip(pairs, shards, strict=True):
                shard.grad = None if parameter.grad is None else local(parameter.grad)
            alone.step()

        seen.step = step  # type: ignore[assignment,method-assign]
        return seen

    setup.build_optimizer = built


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@pytest.mark.parametrize("width", [5, 6, 7, 9])
def test_muon_puts_together_what_is_cut_twice(width: int) -> None:
    """Its products gather columns that tensor parallelism and `fully_shard` have cut, and not evenly."""
    training = Training(
        model=Model(features=3, layers=(Layer(width=width, bias=False),)), data=Data(microbatches=(4,)), optimizer=Muon(), steps=2
    )
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))),
        parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.COLWISE),)), FSDP2()),
    )
    verdict = check(Scenario(training=training, layout=layout))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


@pytest.mark.parametrize("parallelism", [FSDP2(), SPMD(distribution=Distribution.FULLY_SHARD)])
def test_statistics_of_local_shards_are_noticed(parallelism: Parallelism) -> None:
    """Muon on shards of a matrix diverges at the first update, by more than what rounding to bfloat16 explains."""
    training = Training(
        model=Model(features=4, layers=(Layer(width=6, bias=False), Layer(width=2, bias=False))),
        data=Data(microbatches=(4,)),
        optimizer=Muon(),
        loss=Loss.MSE_SUM,
        steps=2,
        seed=1,
    )
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(parallelism,))
    require_supported(Scenario(training=training, layout=layout))
    first = first_divergence(check(Scenario(training=training, layout=layout), alter=on_local_shards))
    assert (first.step, first.phase) == (0, Phase.UPDATE)
