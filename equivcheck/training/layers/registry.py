"""Registry of layer kinds: built-in kinds and third-party entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from equivcheck.errors import UsageError
from equivcheck.scenario import AnyLayer
from equivcheck.scenario.file_format.codec import LAYER_ENTRY_POINTS, register_layer
from equivcheck.training.layers.attention.kind import AttentionKind
from equivcheck.training.layers.experts.kind import ExpertsKind
from equivcheck.training.layers.gated_mlp.kind import GatedMLPKind
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.linear.kind import LinearKind
from equivcheck.training.layers.lora.kind import LoRAKind

_KINDS: dict[type[AnyLayer], LayerKind] = {
    kind.layer_class: kind for kind in (LinearKind(), AttentionKind(), GatedMLPKind(), ExpertsKind(), LoRAKind())
}
_BUILT_IN = frozenset(_KINDS)


def layer_kind(layer: AnyLayer) -> LayerKind:
    """Return the kind that describes a scenario layer. Raises `UsageError` if no kind describes its class."""
    found = _KINDS.get(type(layer))
    if found is None:
        _ask_entry_points()
        found = _KINDS.get(type(layer))
    if found is None:
        raise UsageError(
            f"layer {type(layer).__name__} is not valid: no registered layer kind describes it. "
            f"Expected one of: {', '.join(kind.__name__ for kind in _KINDS)}."
        )
    return found


def register_kind(kind: LayerKind) -> None:
    """Register a layer kind. Raises `UsageError` if its layer class is not valid, or another class has the same tag."""
    register_layer(kind.layer_class)
    _KINDS.setdefault(kind.layer_class, kind)


def third_party_kinds() -> tuple[LayerKind, ...]:
    """Return all layer kinds from installed packages' entry points."""
    _ask_entry_points()
    return tuple(kind for noun, kind in _KINDS.items() if noun not in _BUILT_IN)


@cache
def _ask_entry_points() -> None:
    """Register third-party kinds, once. Raises `UsageError` if a kind cannot be loaded."""
    for entry_point in entry_points(group=LAYER_ENTRY_POINTS):
        try:
            register_kind(entry_point.load()())
        except Exception as error:
            raise UsageError(f"entry point {entry_point.name} of {LAYER_ENTRY_POINTS} cannot be loaded: {error}") from error
