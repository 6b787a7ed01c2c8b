"""Which kind applies which parallelism, and which layouts can be named."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.layouts.base.kind import LayoutKind, P
from equivcheck.layouts.base.rounding import EACH, Rounding, WhenReduced
from equivcheck.scenario import Layout, Precision
from equivcheck.scenario.parallelism import PARALLELISMS

ENTRY_POINTS = "equivcheck.layouts"
"""Entry-point group of third parties; each entry names a subclass of `LayoutKind`."""

SHIPPED: dict[str, str] = {
    "ddp": "ddp.apply:DDPKind",
    "replicate": "replicate.apply:ReplicateKind",
    "fsdp1": "fsdp1.apply:FSDP1Kind",
    "fsdp2": "fsdp2.apply:FSDP2Kind",
    "tensor_parallel": "tensor_parallel.apply:TensorParallelKind",
    "spmd": "spmd.apply:SPMDKind",
    "pipeline": "pipeline.apply:PipelineKind",
    "local_tensor_parallel": "local_tensor_parallel.apply:LocalTensorParallelKind",
    "context_parallel": "context_parallel.apply:ContextParallelKind",
    "expert_parallel": "expert_parallel.apply:ExpertParallelKind",
    "local_data_parallel": "local_data_parallel.apply:LocalDataParallelKind",
}
"""Kinds that ship with equivcheck, by tag. A check imports only those that it uses, so they are named and not imported here."""

COMPOSITIONS: tuple[str, ...] = (
    "ddp x tensor_parallel",
    "replicate x tensor_parallel",
    "fsdp1 x tensor_parallel",
    "fsdp2 x tensor_parallel",
    "ddp x local_tensor_parallel",
    "replicate x local_tensor_parallel",
    "fsdp1 x local_tensor_parallel",
    "fsdp2 x local_tensor_parallel",
    "ddp x context_parallel",
    "replicate x context_parallel",
    "fsdp2 x context_parallel",
    "ddp x expert_parallel",
    "replicate x expert_parallel",
    "fsdp2 x expert_parallel",
    "context_parallel x local_tensor_parallel",
    "expert_parallel x local_tensor_parallel",
    "local_data_parallel x local_tensor_parallel",
    "local_data_parallel x context_parallel",
    "local_data_parallel x expert_parallel",
    "local_data_parallel x context_parallel x local_tensor_parallel",
)
"""Names of the compositions that are generated, as `Layout.name` writes them. Add a line to have one generated."""
TIMES = " x "
"""What stands between two tags."""


class BrokenLayout(EquivCheckError):
    """An entry point does not give a usable kind of layout."""


def kind_of(parallelism: P) -> LayoutKind[P]:
    """The kind of a parallelism. A kind that ships with equivcheck is imported without the others.

    Raises `UsageError` for a parallelism that nobody registered, and `BrokenLayout` if it is a third party's and any entry point
    is broken.
    """
    if type(parallelism) in PARALLELISMS:
        return shipped_kind(parallelism.tag)
    kinds = layout_kinds()
    if parallelism.tag not in kinds:
        raise UsageError(f"no layout is registered for the parallelism {parallelism.tag!r}; registered: {', '.join(kinds)}")
    return kinds[parallelism.tag]


@cache
def shipped_kind(tag: str) -> LayoutKind[Any]:
    """The kind that ships with equivcheck for a tag."""
    kind: type[LayoutKind[Any]] = resolve_name(f"equivcheck.layouts.parallelisms.{SHIPPED[tag]}")
    return kind()


@cache
def layout_kinds() -> dict[str, LayoutKind[Any]]:
    """Every kind by the tag of its parallelism, built-in ones first; loaded once. Raises `BrokenLayout`."""
    kinds = {tag: shipped_kind(tag) for tag in SHIPPED}
    for point in entry_points(group=ENTRY_POINTS):
        kind = _load(point)
        if kind.parallelism.tag in kinds:
            raise BrokenLayout(f"{_place(point)}: the tag {kind.parallelism.tag!r} is taken; taken: {', '.join(kinds)}")
        kinds[kind.parallelism.tag] = kind
    return kinds


@cache
def layout_names() -> tuple[str, ...]:
    """Every layout that can be named: the registered parallelisms by their tags, then the compositions. Raises `BrokenLayout`."""
    return (*layout_kinds(), *COMPOSITIONS)


def kinds_of(name: str) -> tuple[LayoutKind[Any], ...]:
    """The kinds of the parallelisms of a named layout, innermost first. Raises `UsageError` for a name that does not exist."""
    if name not in layout_names():
        raise UsageError(f"layout {name!r} does not exist; allowed: {', '.join(layout_names())}")
    return tuple(layout_kinds()[tag] for tag in reversed(name.split(TIMES)))


def _load(point: EntryPoint) -> LayoutKind[Any]:
    try:
        kind = point.load()
    except Exception as error:
        raise BrokenLayout(f"{_place(point)}: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, LayoutKind) and isinstance(getattr(kind, "parallelism", None), type)):
        raise BrokenLayout(f"{_place(point)}: {kind!r} is not a subclass of LayoutKind with a parallelism")
    try:
        return kind()
    except Exception as error:
        raise BrokenLayout(f"{_place(point)}: {type(error).__name__}: {error}") from error


def _place(point: EntryPoint) -> str:
    return f"entry point {point.name!r} of {ENTRY_POINTS} ({point.value})"


def imports_of(layout: Layout) -> tuple[str, ...]:
    """Modules that ranks of the layout need in addition to those that most ranks need."""
    return tuple(name for parallelism in layout.parallelisms for name in kind_of(parallelism).imports(parallelism))


def when_reduced(layout: Layout) -> WhenReduced:
    """When the layout reduces gradients of several microbatches."""
    found = (kind_of(parallelism).when_reduced(parallelism, layout) for parallelism in layout.parallelisms)
    return next((when for when in found if when is not None), EACH)


def rounding_of(layout: Layout, precision: Precision) -> Rounding | None:
    """What the layout rounds to other element types than the training's; None for nothing."""
    roundings = (kind_of(parallelism).rounding(parallelism, layout, precision) for parallelism in layout.parallelisms)
    return next((rounding for rounding in roundings if rounding is not None), None)


def rounds(layout: Layout) -> bool:
    """Whether the layout rounds to other element types: in one precision as in any other."""
    return rounding_of(layout, Precision.FLOAT32) is not None
