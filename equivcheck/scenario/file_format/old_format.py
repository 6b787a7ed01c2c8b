"""Convert scenarios from format 1: fields with other names, and objects without ``kind``.

Invalid data stays unchanged, because the converter then refuses it and names the path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equivcheck.scenario.data import Data
from equivcheck.scenario.file_format.converter import KIND, Features
from equivcheck.scenario.layers.linear import Layer

Change = Callable[[Any], Any]


def upgrade(scenario: Any) -> Any:
    """Convert a scenario's fields from format 1 to the current format."""
    return _changed(_renamed(scenario, start="resume"), training=_training)


def _training(training: Any) -> Any:
    return _changed(training, model=_model, data=_tagged(Data.tag), loss=lambda loss: {KIND: loss})


def _model(model: Any) -> Any:
    renamed = _renamed(model, features="source")
    return _changed(renamed, source=lambda number: {KIND: Features.tag, "features": number}, layers=_layers)


def _layers(layers: Any) -> Any:
    return [_layer(layer) for layer in layers] if isinstance(layers, list) else layers


def _layer(layer: Any) -> Any:
    return _renamed(_tagged(Layer.tag)(layer), side="auxiliary", exercise="shape_op")


def _tagged(tag: str) -> Change:
    return lambda value: {KIND: tag, **value} if isinstance(value, dict) else value


def _renamed(value: Any, **names: str) -> Any:
    return {names.get(name, name): inner for name, inner in value.items()} if isinstance(value, dict) else value


def _changed(value: Any, **changes: Change) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: changes[name](inner) if name in changes else inner for name, inner in value.items()}
