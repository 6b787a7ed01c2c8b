"""Tests for reference copies under optimizers that mix elements or round inside."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import noise as floor
from equivcheck.oracle.reference.noise import perturbed_copies
from equivcheck.oracle.reference.optimizer_rounding import round_in_optimizer, rounding_setup
from equivcheck.oracle.reference.reference import ReferenceRun, noise_limit
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    SPMD,
    Activation,
    Adafactor,
    Axis,
    Data,
    Distribution,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Muon,
    Optimizer,
    Parallelism,
    Precision,
    Training,
)
from equivcheck.training.copies import train_copies
from equivcheck.training.ensemble import train_ensemble
from equivcheck.training.loop import single_device_setup, train
from equivcheck.worlds.trace.differences import Phase
from support.supported import require_supported

MODEL = Model(features=4, layers=(Layer(width=3, bias=False), Layer(width=2, bias=False)))
TRAINING = Training(model=MODEL, data=Data(microbatches=(4,)), steps=2)
MUON = replace(TRAINING, optimizer=Muon())


@pytest.mark.parametrize(
    ("optimizer", "expected"), [(SGD(), "train_ensemble"), (Adafactor(), "train_copies"), (Muon(), "train_copies")]
)
def test_copies_are_trained_at_once_only_where_they_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer, expected: str
) -> None:
    """A norm over all copies would be wrong, so optimizers with norms train copies one by one."""
    used = []
    for function in (train_ensemble, train_copies):
        monkeypatch.setattr(floor, function.__name__, lambda *arguments, function=function: used.append(function.__name__))
    perturbed_copies(replace(TRAINING, optimizer=optimizer), 2)
    assert used == [expected]


@pytest.mark.parametrize("optimizer", [Adafactor(), Muon()])
def test_the_first_copy_is_the_reference(optimizer: Optimizer) -> None:
    """The first copy is bit for bit the single-device run, even if rounding moves the others."""
    training = replace(TRAINING, optimizer=optimizer)
    reference, copies = train(single_device_setup(training)), perturbed_copies(training, 3, rounding_setup(training))
    for ours, theirs in zip(copies.steps, reference.steps, strict=True):
        assert (ours.parameters[0] == theirs.parameters.values).all()
        assert (ours.parameters[1:] != theirs.parameters.values).any(axis=1).all()


def test_rounding_inside_the_optimizer_moves_what_follows() -> None:
    """Copies move as far as bfloat16 can move an update, but gradients before the first update do not."""
    exact, rounded = perturbed_copies(MUON, 8), perturbed_copies(MUON, 8, rounding_setup(MUON))

    def spread(values: np.ndarray) -> float:
        return float(np.linalg.norm(values[1:] - values[0], axis=1).max() / np.linalg.norm(values[0]))

    assert spread(rounded.steps[0].gradients) < 1e-14
    assert spread(exact.steps[0].parameters) < 1e-14
    assert 1e-5 < spread(rounded.steps[0].parameters) < 1e-1


def test_a_norm_that_is_rounded_moves_a_matrix_as_a_whole() -> None:
    """Muon divides by a norm in bfloat16. Shards round it differently, but elements that move independently do not."""
    norms, momenta = [], []
    for seed in range(20):
        parameter = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
        parameter.grad = torch.ones_like(parameter)
        setup = single_device_setup(replace(MUON, optimizer=Muon(ns_steps=1)))
        round_in_optimizer(setup, np.random.default_rng(seed))
        optimizer = setup.build_optimizer(setup.training, [("weight", parameter)])
        setup.update(optimizer)
        norms.append(float(torch.linalg.vector_norm(parameter.detach())))
        momenta.append(optimizer.state[parameter]["momentum_buffer"])

    assert 0.001 < np.std(norms) / np.mean(norms) < 2 * torch.finfo(torch.bfloat16).eps
    assert all((momentum == momenta[0]).all() for momentum in momenta)


@pytest.mark.parametrize(("width", "seed"), [(30, 3), (30, 21), (30, 25), (30, 27), (26, 26)])
def test_a_sum_over_a_matrix_moved_as_a_whole_is_no_finding(width: int, seed: int) -> None:
    """A loss that adds all outputs shows a common factor much more than single moved elements."""
    layer = Layer(width=width, bias=False, activation=Activation.SIGMOID)
    training = Training(
        model=Model(features=1, layers=(layer, layer)),
        data=Data(microbatches=(6,)),
        optimizer=Muon(ns_steps=1),
        loss=Loss.LINEAR_SUM,
        steps=2,
        seed=seed,
    )
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(FSDP2(),))

    assert check(Scenario(training=training, layout=layout)).is_clear


@pytest.mark.parametrize("layout", [SPMD(distribution=Distribution.FULLY_SHARD), FSDP2()])
@pytest.mark.parametrize("seed", [2270, 6, 8, 46])
def test_products_and_norms_of_shards_that_are_rounded_are_no_finding(seed: int, layout: Parallelism) -> None:
    """If each rank rounds its part in a norm and a Gram matrix, an update moves farther than by moved gradients."""
    layers = tuple(
        Layer(width=2, bias=False, activation=kind) for kind in (Activation.TANH, Activation.IDENTITY, Activation.SILU)
    )
    training = Training(
        model=Model(features=1, layers=layers),
        data=Data(microbatches=(6,)),
        optimizer=Muon(nesterov=False),
        loss=Loss.MSE_SUM,
        seed=seed,
    )
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    scenario = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(layout,)))
    require_supported(scenario)

    assert check(scenario).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(
    ("layout", "precision", "moves"),
    [
        (DDP(), Precision.FLOAT64, False),
        (FSDP2(distributed_muon=True), Precision.FLOAT64, False),
        (FSDP2(), Precision.FLOAT64, True),
        (DDP(), Precision.FLOAT32, True),
    ],
)
def test_whole_matrices_round_as_on_one_device(layout: Parallelism, precision: Precision, moves: bool) -> None:
    """Full matrices round as on one device, except if an input is near a bfloat16 rounding boundary."""
    training = replace(MUON, precision=precision)
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    run = ReferenceRun.of(Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(layout,))))
    (*_, last) = (moment for moment in run.confirming_reference().moments if moment.phase is Phase.UPDATE)
    assert bool(max(last.tolerances / last.norms) > 1e-3) is moves


def test_what_an_optimizer_rounds_to_limits_the_noise() -> None:
    """Half the digits are those of the coarsest type in a step."""
    assert noise_limit(TRAINING) == pytest.approx(2.0**-26)
    assert noise_limit(replace(TRAINING, precision=Precision.FLOAT32)) == pytest.approx(2.0**-11.5)
    assert noise_limit(MUON) == pytest.approx(2.0**-3.5)
