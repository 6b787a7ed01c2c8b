"""Layouts that all round to lower precision."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.composition.limits import repair_layout
from equivcheck.layouts.composition.registry import rounds
from equivcheck.scenario import Compression, Layout, Replicator
from equivcheck.strategies import layouts, mixed_precisions
from equivcheck.strategies.parallelism import DDP_PRECISIONS

OPTIONS: dict[str, SearchStrategy[dict[str, Any]]] = {
    "ddp": DDP_PRECISIONS,
    "replicate": st.just({"implementation": Replicator.DDP, "compression": Compression.FP16}),
    "fsdp1": st.fixed_dictionaries({"mixed_precision": mixed_precisions(outputs=st.none())}),
    "fsdp2": st.fixed_dictionaries({"mixed_precision": mixed_precisions()}),
}
"""By layout, what makes it round."""


@st.composite
def lowered_layouts(draw: DrawFn, tag: str, max_ranks: int = 8, options: SearchStrategy[dict[str, Any]] | None = None) -> Layout:
    """Layouts of one parallelism with options that make it round."""
    layout = draw(layouts(tags=(tag,), max_ranks=max_ranks).filter(lambda layout: tag != "replicate" or _by_ddp(layout)))
    (parallelism,) = layout.parallelisms
    lowered = replace(parallelism, **draw(OPTIONS[tag] if options is None else options))
    layout = repair_layout(replace(layout, parallelisms=(lowered,)))
    assert rounds(layout)
    return layout


def _by_ddp(layout: Layout) -> bool:
    (parallelism,) = layout.parallelisms
    return getattr(parallelism, "implementation", None) is Replicator.DDP
