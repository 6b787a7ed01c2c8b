"""Registry for all kinds of parallelisms, and the names for all layouts."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from equivcheck.errors import EquivCheckError, UsageError, unknown_name
from equivcheck.layouts.base.kind import LayoutKind, P
from equivcheck.layouts.base.rounding import EACH, Rounding, WhenReduced
from equivcheck.scenario import Layout, Precision
from equivcheck.scenario.parallelisms import PARALLELISMS

ENTRY_POINTS = "equivcheck.layouts"
"""Entry-point group for third-party parallelisms. Each entry names a `LayoutKind` subclass."""

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
"""Kinds that ship with equivcheck, by tag. Kinds are given by name, because a check imports only the kinds it uses."""

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
    "ddp x context_parallel x local_tensor_parallel",
    "fsdp2 x context_parallel x local_tensor_parallel",
    "ddp x expert_parallel x local_tensor_parallel",
    "fsdp2 x expert_parallel x local_tensor_parallel",
    "local_data_parallel x expert_parallel x local_tensor_parallel",
    "local_data_parallel x pipeline",
    "fsdp2 x pipeline",
    "ddp x pipeline",
    "replicate x pipeline",
    "pipeline x local_tensor_parallel",
    "pipeline x context_parallel",
    "pipeline x expert_parallel",
    "pipeline x tensor_parallel",
    "local_data_parallel x pipeline x local_tensor_parallel",
    "local_data_parallel x pipeline x context_parallel",
    "local_data_parallel x pipeline x expert_parallel",
    "fsdp2 x pipeline x local_tensor_parallel",
    "fsdp2 x pipeline x tensor_parallel",
    "fsdp2 x pipeline x context_parallel",
    "fsdp2 x pipeline x expert_parallel",
    "ddp x pipeline x local_tensor_parallel",
    "pipeline x context_parallel x local_tensor_parallel",
    "pipeline x expert_parallel x local_tensor_parallel",
)
"""Compositions that strategies generate, named as by `Layout.name`."""
TIMES = " x "
"""Separator between tags."""


class BrokenLayout(EquivCheckError):
    """Error about an unusable third-party parallelism: it has no valid `LayoutKind`, or its limits still apply after repairs."""


def kind_of(parallelism: P) -> LayoutKind[P]:
    """Return the `LayoutKind` of a parallelism. For a built-in parallelism, only its own modules are imported.

    Raises `UsageError` if the parallelism is not registered. For a third-party parallelism, raises `BrokenLayout` if any entry
    point is broken.
    """
    if type(parallelism) in PARALLELISMS:
        return shipped_kind(parallelism.tag)
    kinds = layout_kinds()
    if parallelism.tag not in kinds:
        raise UsageError(
            f"parallelism {parallelism.tag!r} is not valid: it is not registered. Expected one of {', '.join(kinds)}"
        )
    return kinds[parallelism.tag]


@cache
def shipped_kind(tag: str) -> LayoutKind[Any]:
    """Return the `LayoutKind` that ships with equivcheck under a tag such as ``ddp``."""
    kind: type[LayoutKind[Any]] = resolve_name(f"equivcheck.layouts.parallelisms.{SHIPPED[tag]}")
    return kind()


@cache
def layout_kinds() -> dict[str, LayoutKind[Any]]:
    """Return all `LayoutKind` objects by tag, first those that ship with equivcheck.

    They are loaded once. Raises `BrokenLayout` if an entry point is broken.
    """
    kinds = {tag: shipped_kind(tag) for tag in SHIPPED}
    for point in entry_points(group=ENTRY_POINTS):
        place = f"entry point {point.name!r} of {ENTRY_POINTS} ({point.value})"
        try:
            found = point.load()
            is_kind = isinstance(found, type) and issubclass(found, LayoutKind)
            kind = found() if is_kind and isinstance(getattr(found, "parallelism", None), type) else None
        except Exception as error:
            raise BrokenLayout(f"{place}: {type(error).__name__}: {error}") from error
        if kind is None:
            raise BrokenLayout(
                f"{place}: {found!r} is not valid. Expected a subclass of LayoutKind with a class as its `parallelism`"
            )
        tag = kind.parallelism.tag
        if tag in kinds:
            raise BrokenLayout(f"{place}: tag {tag!r} is not valid: it is taken. Expected a tag other than {', '.join(kinds)}")
        kinds[tag] = kind
    return kinds


@cache
def layout_names() -> tuple[str, ...]:
    """All layout names: registered parallelisms by tag, then compositions. Raises `BrokenLayout` if an entry point is broken."""
    return (*layout_kinds(), *COMPOSITIONS)


def kinds_of(name: str) -> tuple[LayoutKind[Any], ...]:
    """Return the `LayoutKind` objects of the layout called `name`, innermost first. Raises `UsageError` for an unknown name."""
    if name not in layout_names():
        raise unknown_name("layout", name, layout_names())
    return tuple(layout_kinds()[tag] for tag in reversed(name.split(TIMES)))


def imports_of(layout: Layout) -> tuple[str, ...]:
    """Return names for the modules to import before a layout's ranks start."""
    return tuple(name for parallelism in layout.parallelisms for name in kind_of(parallelism).imports(parallelism))


def when_reduced(layout: Layout) -> WhenReduced:
    """Return when the layout reduces gradients from several microbatches over ranks."""
    found = (kind_of(parallelism).when_reduced(parallelism, layout) for parallelism in layout.parallelisms)
    return next((when for when in found if when is not None), EACH)


def rounding_of(layout: Layout, precision: Precision) -> Rounding | None:
    """Return how the layout rounds to lower-precision dtypes. None if it uses no other dtype than the training."""
    roundings = (kind_of(parallelism).rounding(parallelism, layout, precision) for parallelism in layout.parallelisms)
    return next((rounding for rounding in roundings if rounding is not None), None)


def rounds(layout: Layout) -> bool:
    """Whether an option of the layout rounds to a lower-precision dtype."""
    return rounding_of(layout, Precision.FLOAT32) is not None
