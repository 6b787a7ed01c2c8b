"""Calls made by optimizers: foreach and fused operations, clipping, complete updates."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.families.elementwise import OTHER
from equivcheck.programs.nouns.operations.operation import Shape, operations

SHAPES: tuple[Shape, ...] = ((4,), (4, 6), (5, 3), (1, 4))
FEW: tuple[Shape, ...] = ((5, 3),)

_FOREACH = (
    *("abs", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "neg", "round", "sigmoid", "sign"),
    *("sin", "sinh", "tan", "tanh"),
)
_FOREACH_POSITIVE = ("lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt")
_FOREACH_OF_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max")
_FOREACH_OF_SCALARS = (*_FOREACH_OF_TWO, "pow")
_BEFORE = "first, second = a.detach().clone(), b.detach().clone()\n"
"""Lines that copy the arguments, because the call overwrites them."""
_ALIKE = f"assert a.shape == b.shape\n{_BEFORE}"
"""Lines that also require equal shapes, because fused updates do not check shapes and would access memory beyond the smaller
tensor.
"""
_STATE = "average, square, step = b.detach() * 0.5, b.detach().abs() * 0.25, {step}\n"
_ONE = "torch.ones((), dtype=torch.float32)"
_KEYWORDS = "lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-3, amsgrad=False, maximize=False"

OPTIMIZERS = (
    *operations(
        {
            "foreach_add": "torch._foreach_add([a, b], [b, a], alpha=0.5)",
            "foreach_norm": "torch._foreach_norm([a, b])",
            "foreach_norm_inf": "torch._foreach_norm([a, b], float('inf'))",
            "foreach_norm_1": "torch._foreach_norm([a, b], 1)",
            "foreach_max": "torch._foreach_max([a, b])",
            "foreach_lerp": "torch._foreach_lerp([a], [b], 0.25)",
            "foreach_addcdiv": "torch._foreach_addcdiv([a], [b], [b.abs() + 1], value=-0.5)",
            "foreach_sqrt": "torch._foreach_sqrt([a.abs() + 1, b.abs() + 1])",
            "foreach_maximum": "torch._foreach_maximum([a], [b])",
            "foreach_div": "torch._foreach_div([a], [b.abs() + 1])",
            "total_norm": "torch.nn.utils.get_total_norm([a, b])",
            "total_norm_inf": "torch.nn.utils.get_total_norm([a, b], float('inf'))",
        },
        arguments=(OTHER,),
        shapes=SHAPES,
    ),
    *operations(
        {
            **{f"foreach_{name}": f"torch._foreach_{name}([a, b])" for name in _FOREACH},
            **{f"foreach_{name}": f"torch._foreach_{name}([a.abs() + 1, b.abs() + 1])" for name in _FOREACH_POSITIVE},
            **{
                f"foreach_{name}_list": f"torch._foreach_{name}([a, b], [b.abs() + 0.25, a.abs() + 0.25])"
                for name in _FOREACH_OF_TWO
            },
            **{
                f"foreach_{name}_scalars": f"torch._foreach_{name}([a.abs(), b.abs()], [0.25, 0.5])"
                for name in _FOREACH_OF_SCALARS
            },
            **{f"foreach_{name}_scalar": f"torch._foreach_{name}([a.abs(), b.abs()], 0.5)" for name in _FOREACH_OF_SCALARS},
            "foreach_trunc": "torch._foreach_trunc([a * 4, b * 4])",
            "foreach_pow_list": "torch._foreach_pow([a.abs() + 1], [b])",
            "foreach_lerp_list": "torch._foreach_lerp([a], [b], [b])",
            "foreach_addcmul": "torch._foreach_addcmul([a], [b], [b], value=0.5)",
            "foreach_addcmul_scalars": "torch._foreach_addcmul([a, b], [b, a], [b, a], [0.5, 2.0])",
            "foreach_addcdiv_scalars": "torch._foreach_addcdiv([a], [b], [b.abs() + 1], [0.5])",
            "foreach_mul_tensor": "torch._foreach_mul([a, b], a.detach().abs().max())",
            "foreach_div_tensor": "torch._foreach_div([a, b], b.detach().abs().max())",
            "foreach_add_tensor": "torch._foreach_add([a, b], a.detach().sum())",
            "foreach_clone": "torch._foreach_clone([a, b])",
        },
        arguments=(OTHER,),
        shapes=FEW,
        drawn=False,
    ),
    *operations(
        {
            **{
                f"foreach_{name}_": f"{_BEFORE}torch._foreach_{name}_([first, second])\n(first, second)"
                for name in ("abs", "exp", "neg", "sigmoid", "sin", "tanh", "zero", "round")
            },
            **{
                f"foreach_{name}_list_": f"{_BEFORE}torch._foreach_{name}_([first], [second.abs() + 0.25])\nfirst"
                for name in _FOREACH_OF_TWO
            },
            **{
                f"foreach_{name}_scalar_": f"{_BEFORE}torch._foreach_{name}_([first, second], 0.5)\n(first, second)"
                for name in ("add", "sub", "mul", "div", "clamp_min")
            },
            **{
                f"foreach_{name}_scalars_": f"{_BEFORE}torch._foreach_{name}_([first, second], [2.0, 0.5])\n(first, second)"
                for name in ("add", "mul", "div")
            },
            "foreach_sqrt_": "first = a.detach().abs() + 1\ntorch._foreach_sqrt_([first])\nfirst",
            "foreach_lerp_": f"{_BEFORE}torch._foreach_lerp_([first], [second], 0.25)\nfirst",
            "foreach_addcdiv_": f"{_BEFORE}torch._foreach_addcdiv_([first], [second], [second.abs() + 1], value=-0.5)\nfirst",
            "foreach_addcmul_": f"{_BEFORE}torch._foreach_addcmul_([first], [second], [second], value=0.5)\nfirst",
            "foreach_mul_tensor_": f"{_BEFORE}torch._foreach_mul_([first], a.detach().abs().max())\nfirst",
            "foreach_copy_": f"{_BEFORE}torch._foreach_copy_([first], [second])\nfirst",
        },
        arguments=(OTHER,),
        shapes=FEW,
        drawn=False,
    ),
    *operations(
        {
            "clip_grads": "gradients = [a.detach().clone(), b.detach().clone()]\n"
            "norm = torch.nn.utils.get_total_norm(gradients)\n"
            "scale = torch.clamp(0.5 / (norm + 1e-6), max=1.0)\n"
            "(gradients[0] * scale, gradients[1] * scale)",
            "clip_value": "gradient = a.detach().clone()\ntorch._foreach_clamp_min_([gradient], -0.5)\n"
            "torch._foreach_clamp_max_([gradient], 0.5)\ngradient + b",
            "powers": "torch.linalg.vector_norm(torch.stack([each for each in torch._foreach_norm([a, b])]))",
        },
        arguments=(OTHER,),
        shapes=SHAPES,
    ),
    *operations(
        {
            "fused_adam": f"{_ALIKE}{_STATE.format(step=_ONE)}"
            f"torch._fused_adam_([first], [second], [average], [square], [], [step], {_KEYWORDS})\n(first, average, square)",
            "fused_adamw": f"{_ALIKE}{_STATE.format(step=_ONE)}"
            f"torch._fused_adamw_([first], [second], [average], [square], [], [step], {_KEYWORDS})\n(first, average, square)",
            "fused_sgd": f"{_ALIKE}average = second * 0.5\n"
            "torch._fused_sgd_([first], [second], [average], weight_decay=0.01, momentum=0.9, lr=0.1, dampening=0.0, "
            "nesterov=False, maximize=False, is_first_step=False)\n(first, average)",
            "fused_adagrad": f"{_ALIKE}square, step = second.square(), {_ONE}\n"
            "torch._fused_adagrad_([first], [second], [square], [step], lr=0.1, lr_decay=0.0, weight_decay=0.01, eps=1e-3, "
            "maximize=False)\n(first, square)",
        },
        arguments=(OTHER,),
        shapes=SHAPES,
    ),
    *operations(
        {
            f"step_of_{name}": "parameter = torch.nn.Parameter(a.detach().clone())\nparameter.grad = b.detach().clone()\n"
            f"optimizer = torch.optim.{call}\n"
            "optimizer.step()\noptimizer.step()\nparameter.detach()"
            for name, call in {
                "sgd": "SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)",
                "sgd_fused": "SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)",
                "adam": "Adam([parameter], lr=0.1, eps=1e-3)",
                "adam_foreach": "Adam([parameter], lr=0.1, eps=1e-3, foreach=True)",
                "adamw_fused": "AdamW([parameter], lr=0.1, eps=1e-3, fused=True)",
                "adam_amsgrad": "Adam([parameter], lr=0.1, eps=1e-3, amsgrad=True, foreach=True)",
                "adagrad_foreach": "Adagrad([parameter], lr=0.1, foreach=True)",
                "rmsprop_foreach": "RMSprop([parameter], lr=0.1, momentum=0.9, centered=True, foreach=True)",
                "adamax": "Adamax([parameter], lr=0.1, foreach=True)",
                "nadam": "NAdam([parameter], lr=0.1, foreach=True)",
                "radam": "RAdam([parameter], lr=0.1, foreach=True)",
                "adadelta": "Adadelta([parameter], lr=0.1, foreach=True)",
                "rprop": "Rprop([parameter], lr=0.1, foreach=True)",
                "asgd": "ASGD([parameter], lr=0.1, foreach=True)",
            }.items()
        },
        arguments=(OTHER,),
        shapes=FEW,
    ),
)
