"""Lower precision, as layouts have it for an option."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Compression, ElementType, LowPrecision, MixedPrecision

PARAMS: SearchStrategy[ElementType | None] = st.sampled_from(
    (ElementType.BFLOAT16, ElementType.FLOAT16, None, ElementType.FLOAT32)
)
REDUCES: SearchStrategy[ElementType | None] = st.sampled_from(
    (None, ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16)
)
OUTPUTS: SearchStrategy[ElementType | None] = st.sampled_from((None, *ElementType))

DDP_OPTIONS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    (
        {"autocast": LowPrecision.BFLOAT16},
        {"autocast": LowPrecision.FLOAT16},
        {"compression": Compression.FP16},
        {"autocast": LowPrecision.BFLOAT16, "compression": Compression.FP16},
    )
)
"""What DDP lowers; its hook for bfloat16 runs on no CPU."""


@st.composite
def mixed_precisions(draw: DrawFn, *, outputs: SearchStrategy[ElementType | None] = OUTPUTS) -> MixedPrecision:
    """`MixedPrecision` with any element types, and those given for the output."""
    param, reduce, output = draw(PARAMS), draw(REDUCES), draw(outputs)
    if param is reduce is output is None:
        return MixedPrecision(param=ElementType.BFLOAT16)
    return MixedPrecision(param=param, reduce=reduce, output=output)
