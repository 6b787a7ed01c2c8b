"""Compilation of models and backwards, and restored compiler settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from equivcheck.layouts.base.limits.execution import has_compiler
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Axis,
    Compile,
    Data,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Replicate,
    Replicator,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.worlds.pool import ranks
from unit.layouts.programs import compiled_graphs

TRAINING = Training(model=Model(features=2, layers=(Layer(width=3), Layer(width=2))), data=Data(microbatches=(2,)))
FORWARD = Execution(compile=Compile.AOT_EAGER)
LAYERS = Execution(compile=Compile.AOT_EAGER, per_layer=True)
BACKWARD = Execution(compiled_autograd=True)
BOTH = Execution(compile=Compile.AOT_EAGER, compiled_autograd=True)
INDUCTOR = Execution(compile=Compile.INDUCTOR)
NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
SMALL = 0.001


def _layout(parallelism: Parallelism, execution: Execution) -> Layout:
    return Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(parallelism,), execution=execution)


def _over_tp(parallelism: Parallelism, execution: Execution) -> Layout:
    mesh = Mesh(axes=(Axis(name="dp", size=1), Axis(name="tp", size=1)))
    plan = TensorParallel(plan=(LayerPlan(), LayerPlan()))
    return Layout(mesh=mesh, parallelisms=(plan, parallelism), execution=execution)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "forward", "backward"),
    [
        pytest.param(Execution(), False, False, id="eager"),
        pytest.param(FORWARD, True, False, id="forward"),
        pytest.param(LAYERS, True, False, id="layers"),
        pytest.param(BACKWARD, True, True, id="backward"),
        pytest.param(BOTH, True, True, id="both"),
        pytest.param(INDUCTOR, True, False, id="inductor", marks=(NEEDS_COMPILER, pytest.mark.slow)),
    ],
)
def test_what_is_asked_for_is_compiled_and_settings_are_put_back(execution: Execution, forward: bool, backward: bool) -> None:
    """Forward, backward or both are compiled as asked, and the next scenario finds the compiler unchanged.

    A compiled backward is itself a Dynamo graph.
    """
    (found,) = ranks("gloo", 1).run(compiled_graphs, Scenario(training=TRAINING, layout=_layout(DDP(), execution))).values
    graphs, captures, as_before = found
    assert (graphs > 0, captures > 0, as_before) == (forward, backward, True)


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        (_layout(FSDP1(), BOTH), _layout(FSDP1(), FORWARD)),
        (_layout(FSDP2(), BACKWARD), _layout(FSDP2(), Execution())),
        (_layout(Replicate(implementation=Replicator.FSDP), BOTH), _layout(Replicate(implementation=Replicator.FSDP), FORWARD)),
        (_layout(DDP(bucket_cap_mb=SMALL), FORWARD), _layout(DDP(), FORWARD)),
        (_layout(Replicate(bucket_cap_mb=SMALL), LAYERS), _layout(Replicate(), LAYERS)),
        (_over_tp(DDP(), BOTH), _over_tp(DDP(), LAYERS)),
        (_over_tp(Replicate(), FORWARD), _over_tp(Replicate(), LAYERS)),
        (_over_tp(Replicate(), BACKWARD), _over_tp(Replicate(), Execution())),
    ],
    ids=lambda layout: f"{layout.name} {layout.execution}",
)
@pytest.mark.usefixtures("of_torch_213")
def test_what_cannot_be_compiled_has_a_reason_and_a_repair(layout: Layout, nearest: Layout) -> None:
    """A layout that torch cannot compile is unsupported, and its repair is supported."""
    assert limit_reason(TRAINING, layout)
    assert repair_layout(layout) == nearest
    assert limit_reason(TRAINING, nearest) is None


@pytest.mark.parametrize(
    "layout",
    [
        _layout(DDP(bucket_cap_mb=SMALL), BOTH),
        _layout(Replicate(), BOTH),
        _layout(FSDP2(), LAYERS),
        _over_tp(Replicate(implementation=Replicator.FSDP), FORWARD),
        _over_tp(FSDP2(), FORWARD),
        _over_tp(DDP(), LAYERS),
    ],
    ids=lambda layout: f"{layout.name} {layout.execution}",
)
@pytest.mark.usefixtures("of_torch_213")
def test_what_torch_compiles_is_supported(layout: Layout) -> None:
    """Limits do not exclude a layout that torch compiles."""
    assert limit_reason(TRAINING, layout) is None
    assert repair_layout(replace(layout)) == layout


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the machine has no C++ compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    has_compiler.cache_clear()
    yield
    has_compiler.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_nothing_is_drawn_for_inductor() -> None:
    """Without a C++ compiler, Inductor is unsupported, and scenarios are drawn for another backend."""
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    layout = Layout(mesh=mesh, parallelisms=(DDP(),), execution=INDUCTOR)

    reason = limit_reason(TRAINING, layout)

    assert reason is not None
    assert "without a C++ compiler" in reason
    assert repair_layout(layout).execution == FORWARD
