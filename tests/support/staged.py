"""Models and pipelines for tests of compositions with pipelines."""

from __future__ import annotations

from equivcheck.scenario import Attention, GatedMLP, Head, Layer, Model, Norm, Pipeline, PipelineSchedule, Tokens

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=5, padding=1),
    length=3,
    layers=(
        Attention(num_heads=2, num_kv_heads=2, head_dim=2, norm=Norm.RMS),
        Layer(width=4, residual=True),
        GatedMLP(hidden=3),
        Layer(width=4, frozen=True),
    ),
    head=Head(norm=Norm.RMS, tied=True),
)
"""A model whose first and last stage share the embedding."""
PIPELINES = {
    "gpipe": Pipeline(num_chunks=2, static_shapes=True),
    "1f1b_of_uneven_stages": Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=2, boundaries=(3,)),
    "interleaved": Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2, num_chunks=2),
    "zbv": Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2),
}
