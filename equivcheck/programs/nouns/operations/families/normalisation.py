"""Normalisations, convolutions and pooling."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import (
    CUBES,
    IMAGES,
    MATRICES,
    Argument,
    ArgumentKind,
    Shape,
    last_dim,
    operations,
)


def _channels(shape: Shape, _dim: int) -> Shape:
    return (shape[1],)


def _kernel(shape: Shape, _dim: int) -> Shape:
    return (4, shape[1], 3)


def _kernel_of_channel(shape: Shape, _dim: int) -> Shape:
    return (shape[1], 1, 3)


def _transposed(shape: Shape, _dim: int) -> Shape:
    return (shape[1], 4, 3)


LAYERS = ((4, 6), (5, 3), (1, 4), CUBES[0])
PLANES = ((2, 4, 4, 6), (3, 2, 5, 4))
WEIGHT = Argument(shapes=(last_dim,))

NORMALISATION = (
    *operations(
        {
            "layer_norm": "F.layer_norm(a, a.shape[-1:])",
            "rms_norm": "F.rms_norm(a, a.shape[-1:])",
            "normalize": "F.normalize(a, dim=-1)",
            "layer_norm_2": "F.layer_norm(a, a.shape[-2:])",
        },
        shapes=(*LAYERS, (0, 3)),
    ),
    *operations(
        {"layer_norm_weight": "F.layer_norm(a, a.shape[-1:], b)", "rms_norm_weight": "F.rms_norm(a, a.shape[-1:], b)"},
        arguments=(WEIGHT,),
        shapes=LAYERS,
    ),
    *operations(
        {"layer_norm_bias": "F.layer_norm(a, a.shape[-1:], b, c)"},
        arguments=(WEIGHT, WEIGHT),
        shapes=LAYERS[:2],
    ),
    *operations({"group_norm": "F.group_norm(a, 2)", "instance_norm": "F.instance_norm(a)"}, shapes=(*IMAGES, PLANES[0])),
    *operations(
        {"group_norm_weight": "F.group_norm(a, 1, b, b)"},
        arguments=(Argument(shapes=(_channels,)),),
        shapes=IMAGES,
    ),
    *operations(
        {
            "batch_norm": "F.batch_norm(a, None, None, training=True)",
            "batch_norm_statistics": "mean, var = a.new_zeros(a.shape[1]), a.new_ones(a.shape[1])\n"
            "(F.batch_norm(a, mean, var, training=True), mean, var)",
        },
        shapes=(*MATRICES[:2], *IMAGES),
    ),
    *operations(
        {"batch_norm_running": "F.batch_norm(a, b.detach(), b.detach().abs() + 1)"},
        arguments=(Argument(shapes=(_channels,), kind=ArgumentKind.WEIGHTS),),
        shapes=(*MATRICES[:2], *IMAGES[:1]),
    ),
    *operations(
        {
            "conv1d": "F.conv1d(a, b)",
            "conv1d_padded": "F.conv1d(a, b, padding=1)",
            "conv1d_stride": "F.conv1d(a, b, stride=2, padding=1)",
        },
        arguments=(Argument(shapes=(_kernel,)),),
        shapes=IMAGES,
    ),
    *operations(
        {"conv1d_channels": "F.conv1d(a, b, padding=1, groups=a.shape[1])"},
        arguments=(Argument(shapes=(_kernel_of_channel,)),),
        shapes=IMAGES,
    ),
    *operations(
        {"conv_transpose1d": "F.conv_transpose1d(a, b)"},
        arguments=(Argument(shapes=(_transposed,)),),
        shapes=IMAGES,
    ),
    *operations(
        {
            "avg_pool1d": "F.avg_pool1d(a, 2)",
            "adaptive_avg_pool1d": "F.adaptive_avg_pool1d(a, 1)",
            "interpolate": "F.interpolate(a, scale_factor=2)",
        },
        shapes=IMAGES,
    ),
    *operations({"max_pool1d": "F.max_pool1d(a, 2)"}, shapes=IMAGES, distinct=True),
)
