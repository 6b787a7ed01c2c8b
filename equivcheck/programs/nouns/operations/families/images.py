"""Pooling and resampling planes and volumes."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import IMAGES, Argument, ArgumentKind, Shape, operations

PLANES: tuple[Shape, ...] = ((2, 4, 4, 6), (3, 2, 5, 4))
VOLUMES: tuple[Shape, ...] = ((2, 2, 3, 4, 4),)


def _kernel(shape: Shape, _dim: int) -> Shape:
    return (4, shape[1], 3, 3)


def _grid(shape: Shape, _dim: int) -> Shape:
    return (shape[0], 2, 3, 2)


POOLING = (
    *operations(
        {
            "avg_pool2d": "F.avg_pool2d(a, 2)",
            "adaptive_avg_pool2d": "F.adaptive_avg_pool2d(a, 2)",
            "avg_pool2d_padded": "F.avg_pool2d(a, 3, stride=2, padding=1, count_include_pad=False)",
            "lp_pool2d": "F.lp_pool2d(a, 2, 2)",
            "fold_back": "F.fold(F.unfold(a, 2), a.shape[-2:], 2)",
            "im2col": "F.unfold(a, 2)",
        },
        shapes=PLANES,
    ),
    *operations(
        {
            "max_pool2d": "F.max_pool2d(a, 2)",
            "max_pool2d_indices": "F.max_pool2d(a, 2, return_indices=True)",
            "adaptive_max_pool2d": "F.adaptive_max_pool2d(a, 2)",
            "max_unpool2d": "F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2, output_size=a.shape[-2:])",
        },
        shapes=PLANES,
        distinct=True,
    ),
    *operations({"max_pool3d": "F.max_pool3d(a, 2)"}, shapes=VOLUMES, distinct=True),
    *operations({"avg_pool3d": "F.avg_pool3d(a, 2)"}, shapes=VOLUMES),
    *operations({"adaptive_max_pool1d": "F.adaptive_max_pool1d(a, 2)"}, shapes=IMAGES, distinct=True),
)
RESAMPLING = (
    *operations(
        {
            "pixel_shuffle": "F.pixel_shuffle(a, 2)",
            "pixel_unshuffle": "F.pixel_unshuffle(a, 2)",
            "channel_shuffle": "F.channel_shuffle(a, 2)",
            "upsample_nearest2d": "F.interpolate(a, scale_factor=2)",
            "upsample_exact2d": "F.interpolate(a, scale_factor=2, mode='nearest-exact')",
            "upsample_bilinear2d": "F.interpolate(a, scale_factor=2, mode='bilinear')",
            "upsample_bicubic2d": "F.interpolate(a, size=(5, 5), mode='bicubic', align_corners=True)",
            "upsample_antialiased": "F.interpolate(a, size=(3, 3), mode='bilinear', antialias=True)",
            "pad_planes": "F.pad(a, (1, 0, 0, 1))",
            "pad_reflect2d": "F.pad(a, (1, 1, 1, 1), mode='reflect')",
            "pad_circular": "F.pad(a, (1, 1, 0, 0), mode='circular')",
        },
        shapes=PLANES,
    ),
    *operations(
        {
            "upsample_linear1d": "F.interpolate(a, scale_factor=2, mode='linear')",
            "upsample_exact1d": "F.interpolate(a, scale_factor=2, mode='nearest-exact')",
        },
        shapes=IMAGES,
    ),
    *operations(
        {
            "upsample_nearest3d": "F.interpolate(a, scale_factor=2)",
            "upsample_trilinear3d": "F.interpolate(a, scale_factor=2, mode='trilinear')",
        },
        shapes=VOLUMES,
    ),
    *operations(
        {"grid_sample": "F.grid_sample(a, b.detach() / 4, align_corners=False)"},
        arguments=(Argument(shapes=(_grid,), kind=ArgumentKind.WEIGHTS),),
        shapes=PLANES,
    ),
    *operations(
        {
            "conv2d": "F.conv2d(a, b)",
            "conv2d_padded": "F.conv2d(a, b, stride=2, padding=1)",
            "conv2d_dilated": "F.conv2d(a, b, padding=2, dilation=2)",
        },
        arguments=(Argument(shapes=(_kernel,)),),
        shapes=PLANES,
    ),
)
IMAGE = (*POOLING, *RESAMPLING)
