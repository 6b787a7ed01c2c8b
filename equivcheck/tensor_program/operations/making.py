"""Tensors made from others, in-place operations on copies, and the operations of optimizers."""

from __future__ import annotations

from equivcheck.tensor_program.operations.elementwise import BROADCAST, OTHER
from equivcheck.tensor_program.operations.operation import MATRICES, facts

SHAPES = ((), (4,), *MATRICES)

MAKING = (
    *facts(
        "like another",
        {
            "zeros_like": "torch.zeros_like(a)",
            "ones_like": "torch.ones_like(a) + a",
            "full_like": "torch.full_like(a, 0.5)",
            "new_zeros": "a.new_zeros(a.shape)",
            "new_ones": "a.new_ones(2, 3)",
            "new_full": "a.new_full(a.shape, 0.25) + a",
            "new_tensor": "a * a.new_tensor(2.0)",
            "zeros_like_int": "torch.zeros_like(a, dtype=torch.int64)",
            "numel": "a * a.numel()",
            "scale_by_size": "a / a.shape[-1] ** 0.5",
        },
        shapes=SHAPES,
    ),
    *facts(
        "in place",
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
    *facts(
        "in place",
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
    *facts(
        "of optimizers",
        {
            "addcdiv_": "a.clone().addcdiv_(b, b.abs() + 1, value=-0.5)",
            "addcmul_": "a.clone().addcmul_(b, b, value=0.5)",
            "foreach_add": "torch._foreach_add([a, b], [b, a], alpha=0.5)",
            "foreach_mul_scalar": "torch._foreach_mul([a, b], 2.0)",
            "foreach_norm": "torch._foreach_norm([a, b])",
            "foreach_lerp": "torch._foreach_lerp([a], [b], 0.25)",
            "foreach_addcdiv": "torch._foreach_addcdiv([a], [b], [b.abs() + 1], value=-0.5)",
            "foreach_sqrt": "torch._foreach_sqrt([a.abs() + 1, b.abs() + 1])",
            "foreach_maximum": "torch._foreach_maximum([a], [b])",
            "foreach_div": "torch._foreach_div([a], [b.abs() + 1])",
            "total_norm": "torch.nn.utils.get_total_norm([a, b])",
        },
        arguments=(OTHER,),
        shapes=((4,), (4, 6), (5, 3), (1, 4)),
    ),
)
