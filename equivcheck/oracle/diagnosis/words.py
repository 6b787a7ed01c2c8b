"""Tensors, ranks and axes in the words of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.oracle.diagnosis.case import Case
from equivcheck.scenario import Mesh

_NAMED = 2
"""Tensors named before the rest is counted."""


def tensors(names: Sequence[str]) -> str:
    """```a` and `b```, or ```a`, `b` and 3 more``."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) <= _NAMED + 1:
        return listed(quoted)
    return f"{', '.join(quoted[:_NAMED])} and {len(quoted) - _NAMED} more"


def listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def gradients(case: Case, names: Sequence[str]) -> str:
    """The gradient of one or of some tensors, or of all that have one, with the verb that follows: is or are."""
    if len(names) == 1:
        return f"the gradient of `{names[0]}` is"
    if set(names) >= set(trained(case)):
        return "all gradients are"
    return f"the gradients of {tensors(names)} are"


def trained(case: Case) -> tuple[str, ...]:
    """The parameters that have a gradient, or had one at some step."""
    moments = [moment for moment in case.reference.moments if moment.phase.value == "gradient"]
    names = moments[0].table.names
    return tuple(name for at, name in enumerate(names) if any(moment.present[at] for moment in moments))


def over(mesh: Mesh, axes: Sequence[str]) -> str:
    """The ranks along some axes: ``the 2 dp ranks``, ``the 2 x 2 dp_replicate x dp_shard ranks``."""
    sizes = " x ".join(str(mesh.size(name)) for name in axes)
    return f"the {sizes} {' x '.join(axes)} ranks"
