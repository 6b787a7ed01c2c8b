"""Tensors created like another tensor, and in-place operations on copies."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.families.elementwise import BROADCAST, OTHER
from equivcheck.programs.nouns.operations.operation import MATRICES, operations

SHAPES = ((), (4,), *MATRICES)

MAKING = (
    *operations(
        {
            "zeros_like": "torch.zeros_like(a)",
            "ones_like": "torch.ones_like(a) + a",
            "full_like": "torch.full_like(a, 0.5)",
            "new_zeros": "a.new_zeros(a.shape)",
            "new_ones": "a.new_ones(2, 3)",
            "new_full": "a.new_full(a.shape, 0.25) + a",
            "new_tensor": "a * a.new_tensor(2.0)",
            "zeros_like_int": "torch.zeros_like(a, dtype=torch.int64)",
            "empty_like_filled": "torch.empty_like(a).fill_(0.5)",
            "new_empty_filled": "a.new_empty(a.shape).zero_() + a",
            "new_empty_strided_filled": "a.new_empty_strided(a.shape, a.stride()).zero_()",
            "new_zeros_other": "a.new_zeros(4, 6)",
            "full_like_of_sum": "torch.full_like(a, 2.0) * a.sum()",
            "zeros_like_bool": "torch.zeros_like(a, dtype=torch.bool)",
            "ones_like_int": "torch.ones_like(a, dtype=torch.int64).sum()",
            "numel": "a * a.numel()",
            "scale_by_size": "a / a.shape[-1] ** 0.5",
        },
        shapes=SHAPES,
    ),
    *operations(
        {
            "add_scalar_": "a.clone().add_(1.5)",
            "mul_scalar_": "a.clone().mul_(2)",
            "zero_": "a.clone().zero_()",
            "fill_": "a.clone().fill_(0.5)",
            "clamp_": "a.clone().clamp_(-0.5, 0.5)",
            "relu_": "F.relu(a.clone(), inplace=True)",
            "masked_fill_": "a.clone().masked_fill_(a > 0, 1.0)",
            "t_": "a.clone().t_()",
            "squeeze_": "a.clone().squeeze_()",
            "unsqueeze_": "a.clone().unsqueeze_(0)",
        },
        shapes=SHAPES,
    ),
    *operations(
        {
            "add_": "a.clone().add_(b)",
            "iadd": "out = a.clone()\nout += b\nout",
            "mul_": "a.clone().mul_(b)",
            "div_": "a.clone().div_(b.abs() + 1)",
            "copy_": "a.clone().copy_(b)",
            "lerp_": "a.clone().lerp_(b, 0.25)",
            "sub_alpha_": "a.clone().sub_(b, alpha=0.5)",
        },
        arguments=(BROADCAST,),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "addcdiv_": "a.clone().addcdiv_(b, b.abs() + 1, value=-0.5)",
            "addcmul_": "a.clone().addcmul_(b, b, value=0.5)",
            "baddbmm_": "a[None].clone().baddbmm_(a[None], (b.t() @ b)[None])",
            "addmm_": "a.clone().addmm_(a, b.t() @ b)",
            "set_data": "out = a.detach().clone()\nout.data = b.detach() * 2\nout",
        },
        arguments=(OTHER,),
        shapes=((4,), (4, 6), (5, 3), (1, 4)),
    ),
)
