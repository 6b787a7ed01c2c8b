"""How what a differentiable collective is given may lie in memory, so that its gradient is right over gloo. No torch."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivcheck.system.choice import PrintableEnum


class Memory(PrintableEnum):
    """How a tensor lies in memory."""

    ROWS = "rows"
    """Contiguous."""
    REVERSED = "reversed"
    """Dims in the reversed order, as of a transposed matrix."""
    GAPS = "gaps"
    """Every other element of a tensor of twice the width."""
    EXPANDED = "expanded"
    """One number for all elements, as the gradient of a sum has it."""


class Allowed(PrintableEnum):
    """What tensors a collective may be given."""

    ANY = "any"
    """Every member has its own way, and so has each of its tensors."""
    ONE_ORDER = "one order"
    """As `ANY`, but for reversed dims, which all tensors of all members have, or none."""
    DENSE = "dense"
    """Contiguous ones, or all of them with reversed dims: what is in gaps, or beyond an expanded number, would be read."""
    IN_ORDER = "in order"
    """As `ANY`, but for reversed dims."""
    ROWS = "rows"
    """Contiguous ones."""


class Side(PrintableEnum):
    """Which tensors."""

    INPUTS = "inputs"
    """What goes in."""
    GRADIENTS = "gradients"
    """The gradients of what comes out."""


Memories = tuple[Memory, ...]
"""Of each member; of its tensors after the first, that of the next member, and so on. Empty if all are contiguous."""
_MIXED: dict[Allowed, Memories] = {
    Allowed.ANY: tuple(Memory),
    Allowed.ONE_ORDER: (Memory.ROWS, Memory.GAPS, Memory.EXPANDED),
    Allowed.DENSE: (Memory.ROWS,),
    Allowed.IN_ORDER: (Memory.ROWS, Memory.GAPS, Memory.EXPANDED),
    Allowed.ROWS: (Memory.ROWS,),
}


def memory_of(memories: Memories, member: int, index: int) -> Memory:
    """How one of a member's tensors lies."""
    return memories[(member + index) % len(memories)] if memories else Memory.ROWS


def is_allowed(allowed: Allowed, memories: Memories) -> bool:
    """Whether tensors that lie so are generated."""
    one_order = allowed in (Allowed.ONE_ORDER, Allowed.DENSE) and set(memories) == {Memory.REVERSED}
    return one_order or set(memories) <= set(_MIXED[allowed])


@st.composite
def memories(draw: DrawFn, side: Side, allowed: Allowed, size: int) -> Memories:
    """Half of the time contiguous; inputs are never expanded, as no number of theirs would be another's."""
    if draw(st.booleans()):
        return ()
    if allowed in (Allowed.ONE_ORDER, Allowed.DENSE) and draw(st.booleans()):
        return (Memory.REVERSED,) * size
    choices = [memory for memory in _MIXED[allowed] if side is Side.GRADIENTS or memory is not Memory.EXPANDED]
    return tuple(draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size)))
