"""A plain training, and layouts of one parallelism: what tests of limits start from."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Training

PLAIN = Training(model=Model(features=4, layers=(Layer(width=4), Layer(width=4))), data=Data(microbatches=(4,)), steps=2)


def layout_of(parallelism: Parallelism, size: int = 2) -> Layout:
    """A parallelism along the first of its axes."""
    return Layout(mesh=Mesh(axes=(Axis(name=parallelism.axes[0][0], size=size),)), parallelisms=(parallelism,))


def with_layer(index: int = 1, **changes: object) -> Training:
    """The plain training with another layer in one place."""
    layers = list(PLAIN.model.layers)
    layers[index] = replace(layers[index], **changes)  # type: ignore[arg-type]
    return replace(PLAIN, model=replace(PLAIN.model, layers=tuple(layers)))
