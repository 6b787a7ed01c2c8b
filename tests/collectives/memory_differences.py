"""Where gradients, or values, are wrong over gloo because of how tensors lie in memory; sim refuses each, others are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.cases import REDUCTIONS, ROOTED, Case, Kind
from collectives.gradient_memory import Memories, Memory, Side
from collectives.gradients import Derivative, Form

ROWS, REVERSED, GAPS, EXPANDED = Memory
MISMATCH = "collectives do not match: .* memory orders of dims differ"
GAPS_REFUSED = "gloo transfers wrong elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDifference:
    """Tensors of which gloo makes wrong numbers, without an error, or which it refuses; sim refuses them all."""

    kind: Kind
    """Which function of ``torch.distributed.nn.functional``."""
    side: Side
    """Which tensors."""
    memories: Memories
    """How they lie, by member."""
    refusal: str
    """Regular expression that sim's failure contains."""
    error: str = ""
    """The same of gloo's where it raises; empty where it returns wrong numbers."""
    reason: str
    """Why."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind.value}: {self.side.value} {', '.join(memory.value for memory in self.memories)}"

    @property
    def derivative(self) -> Derivative:
        """The call."""
        rows = ((2, 2), (2, 2)) if self.kind is Kind.ALL_TO_ALL_SINGLE else ()
        op, shape = "sum" if self.kind in REDUCTIONS else "", (3,) if rows else (2, 3)
        case = Case(kind=self.kind, group=(0, 1), shape=shape, rows=rows, op=op, root=int(self.kind in ROOTED), seed=5)
        inputs = self.memories if self.side is Side.INPUTS else ()
        gradients = self.memories if self.side is Side.GRADIENTS else ()
        return Derivative(form=Form.NN, case=case, inputs=inputs, gradients=gradients)


_MIXED_COPIES = "the copy that is sent keeps the order of dims, and gloo takes memory as it lies (pytorch #24836)"
_MIXED = tuple(
    MemoryDifference(kind=kind, side=side, memories=(ROWS, REVERSED), refusal=MISMATCH, reason=_MIXED_COPIES)
    for kind in (Kind.BROADCAST, Kind.REDUCE)
    for side in Side
)
_SCATTERED = "parts are scattered as they lie (pytorch #24836, #192920)"

MEMORY_DIFFERENCES = (
    *_MIXED,
    *(
        MemoryDifference(kind=Kind.SCATTER, side=Side.INPUTS, memories=memories, refusal=refusal, reason=_SCATTERED)
        for memories, refusal in (((ROWS, REVERSED), "orders"), ((GAPS, GAPS), GAPS_REFUSED))
    ),
    *(
        MemoryDifference(
            kind=Kind.GATHER,
            side=Side.GRADIENTS,
            memories=memories,
            refusal=refusal,
            reason="the backward scatters the gradients as they lie, those of a sum included (pytorch #24836, #192920)",
        )
        for memories, refusal in (
            ((ROWS, REVERSED), "orders"),
            ((GAPS, GAPS), GAPS_REFUSED),
            ((EXPANDED, EXPANDED), GAPS_REFUSED),
        )
    ),
    *(
        MemoryDifference(
            kind=Kind.ALL_GATHER,
            side=Side.GRADIENTS,
            memories=memories,
            refusal="orders",
            reason="the backward scatters contiguous copies into tensors that lie as the gradients do",
        )
        for memories in ((REVERSED, REVERSED), (ROWS, REVERSED))
    ),
    *(
        MemoryDifference(
            kind=Kind.ALL_TO_ALL_SINGLE,
            side=Side.INPUTS,
            memories=memories,
            refusal="is not contiguous",
            error="must be contiguous",
            reason="the input is passed on as it lies",
        )
        for memories in ((REVERSED, REVERSED), (ROWS, REVERSED), (GAPS, GAPS))
    ),
)
