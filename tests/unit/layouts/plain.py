"""A plain training, and layouts with one parallelism, for tests of limits."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Training

PLAIN = Training(model=Model(features=4, layers=(Layer(width=4), Layer(width=4))), data=Data(microbatches=(4,)), steps=2)


def layout_of(parallelism: Parallelism, size: int = 2) -> Layout:
    """Layout with a parallelism along the first of its axes."""
    return Layout(mesh=Mesh(axes=(Axis(name=parallelism.axes[0][0], size=size),)), parallelisms=(parallelism,))


def with_layer(index: int = 1, **changes: object) -> Training:
    """The plain training with another layer at one index."""
    layers = list(PLAIN.model.layers)
    layers[index] = replace(layers[index], **changes)  # type: ignore[arg-type]
    return replace(PLAIN, model=replace(PLAIN.model, layers=tuple(layers)))
