"""Mathematical functions, in place and with `out=`: many names, but few rules in torch. Sweeps run all these functions.

Random programs use none, because they would have little else.
"""

from __future__ import annotations

from equivcheck.programs.nouns.operations.families.elementwise import OTHER
from equivcheck.programs.nouns.operations.operation import Argument, ArgumentKind, Shape, first_shape, operations

SHAPES: tuple[Shape, ...] = ((4, 6), (5, 3))
ONE: tuple[Shape, ...] = ((5, 6),)

_ANYWHERE = (
    *("asinh", "atan", "ceil", "cos", "cosh", "deg2rad", "rad2deg", "erfc", "exp2", "expm1", "frac", "i0", "positive"),
    *("sgn", "sinh", "tan", "signbit"),
)
"""Torch functions defined for all numbers."""
_SPECIAL = ("erfcx", "i0e", "i1", "i1e", "log_ndtr", "bessel_j0", "bessel_j1", "airy_ai", "spherical_bessel_j0")
"""Functions in `torch.special`."""
_POSITIVE = ("acosh", "digamma", "lgamma", "log", "log2", "log10")
"""Functions applied to values above 1."""
_WITHIN_ONE = ("acos", "asin", "atanh", "erfinv")
"""Functions applied to values between -1 and 1."""
_ACTIVATIONS = ("celu", "hardshrink", "mish", "selu", "softshrink", "softsign", "tanhshrink")
_IN_PLACE = (
    *("abs", "ceil", "cos", "erf", "exp", "exp2", "expm1", "floor", "frac", "neg", "round", "sgn", "sigmoid", "sign", "sin"),
    *("sinh", "square", "tanh", "atan", "nan_to_num"),
)
_IN_PLACE_POSITIVE = ("log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "sqrt", "lgamma", "digamma")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_TWO = ("copysign", "fmax", "fmin", "fmod", "heaviside", "logaddexp", "logaddexp2", "nextafter", "ldexp")
_INTEGERS = ("gcd", "lcm", "bitwise_and", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
_OUT = {
    "add_out": "torch.add({a}, {b}, out=torch.empty_like(a))",
    "sub_out": "torch.sub({a}, {b}, alpha=2, out=torch.empty_like(a))",
    "mul_out": "torch.mul({a}, {b}, out=torch.empty_like(a))",
    "div_out": "torch.div({a}, {b}.abs() + 1, out=torch.empty_like(a))",
    "maximum_out": "torch.maximum({a}, {b}, out=torch.empty_like(a))",
    "gt_out": "torch.gt({a}, {b}, out=torch.empty_like(a, dtype=torch.bool))",
    "where_out": "torch.where({a} > 0, {a}, {b}, out=torch.empty_like(a))",
    "addcmul_out": "torch.addcmul({a}, {b}, {b}, out=torch.empty_like(a))",
    "exp_out": "torch.exp({a}, out={b}.clone())",
    "clamp_out": "torch.clamp({a}, -0.5, 0.5, out={b}.clone())",
    "neg_out": "torch.neg({a}, out={b}.clone())",
}

FUNCTIONS = (
    *operations(
        {
            **{name: f"torch.{name}(a)" for name in _ANYWHERE},
            **{f"special_{name}": f"torch.special.{name}(a.detach())" for name in _SPECIAL},
            **{name: f"torch.{name}(a.abs() + 1.5)" for name in _POSITIVE},
            **{name: f"torch.{name}(a / 4)" for name in _WITHIN_ONE},
            **{name: f"F.{name}(a)" for name in _ACTIVATIONS},
            # Drawn numbers are below 1. They are scaled up to reach the function's other branches.
            "hardsigmoid": "F.hardsigmoid(a * 4)",
            "relu6": "F.relu6(a * 8)",
            "trunc": "torch.trunc(a * 4)",
            "isinf": "torch.isinf(F.relu(a).log())",
            "isnan": "torch.isnan(a.log())",
            "isneginf": "torch.isneginf(F.relu(a).log())",
            "isposinf": "torch.isposinf(1 / F.relu(a))",
            # Near 0 the gradient cancels, and DTensors (torch >=2.11) round it differently, by more than the measured noise.
            "sinc": "torch.sinc(a.abs() + 0.5)",
            "special_entr": "torch.special.entr(a.abs())",
            "logit": "torch.logit(a.abs() / 8 + 0.1)",
            "polygamma": "torch.polygamma(1, a.abs() + 1)",
            "mvlgamma": "torch.mvlgamma(a.abs() + 3, 2)",
            "glu": "F.glu(a, 0)",
            "prelu": "F.prelu(a, a.flatten()[:1].abs())",
            "round_decimals": "a.round(decimals=1)",
            "frexp": "torch.frexp(a.detach())",
            "bitwise_not": "~(a > 0)",
            "float_power": "(a.abs() + 1).float_power(2)",
            "pow_of_scalar": "2.0 ** a",
            "pow_tensor": "(a.abs() + 1) ** a",
            "div_floor": "torch.div(a.detach(), 0.3, rounding_mode='floor')",
            "div_trunc": "torch.div(a.detach(), 0.3, rounding_mode='trunc')",
            "fmod_scalar": "torch.fmod(a, 0.7)",
            "clamp_max": "a.clamp(max=0.1)",
            "xlogy_scalar": "torch.xlogy(a, 2.0)",
            "shift_left": "(a * 4).long() << 2",
            "shift_right": "(a * 64).long() >> 2",
            "xor_scalar": "(a * 64).long() ^ 5",
            "and_scalar": "(a * 64).long() & 6",
            "or_scalar": "(a * 64).long() | 3",
            "square_of_sum": "(a + a).square() - a",
            "to_int": "(a * 8).to(torch.int64)",
            "double_and_back": "a.float().double()",
            "complex_and_back": "torch.view_as_real(torch.complex(a, a))",
            "count_by_mask": "(a > 0).sum()",
            "mean_of_mask": "(a > 0).double().mean()",
        },
        shapes=SHAPES,
        drawn=False,
    ),
    *operations(
        {
            **{f"{name}_": f"a.clone().{name}_()" for name in _IN_PLACE},
            **{f"{name}_": f"(a.abs() + 1.5).{name}_()" for name in _IN_PLACE_POSITIVE},
            **{f"{name}_scalar_": f"a.clone().{name}_(0.25)" for name in _COMPARISONS if name not in ("eq", "ne")},
            **{f"{name}_scalar_": f"(a * 4).round().{name}_(1)" for name in ("eq", "ne")},
            **{f"{name}_": f"F.{name}(a.clone(), inplace=True)" for name in ("silu", "elu", "leaky_relu", "selu")},
            "hardtanh_": "F.hardtanh(a * 2, inplace=True)",
            "trunc_": "(a * 4).trunc_()",
            "logical_not_": "a.clamp(min=0).logical_not_()",
            "sub_scalar_": "a.clone().sub_(0.5)",
            "div_scalar_": "a.clone().div_(4)",
            "pow_scalar_": "a.clone().pow_(2)",
            "remainder_scalar_": "a.clone().remainder_(0.7)",
            "clamp_min_": "a.clone().clamp_(min=0.1)",
            "threshold_": "F.threshold(a.clone(), 0.1, 20.0, inplace=True)",
            "tril_": "a.clone().tril_()",
            "triu_": "a.clone().triu_(1)",
            "transpose_": "a.clone().transpose_(0, 1)",
            "detach_": "(a * 2).detach_()",
            "fill_diagonal_": "a.clone().fill_diagonal_(0.5)",
        },
        shapes=SHAPES,
        drawn=False,
    ),
    *operations(
        {
            **{f"{name}_of_two": f"torch.{name}(a.detach(), b.detach().abs())" for name in _OF_TWO if name != "ldexp"},
            **{f"{name}_of_two": f"torch.{name}((a * 8).long().abs(), (b * 2).long().abs())" for name in _INTEGERS},
            **{f"{name}_tensor_": f"a.clone().{name}_(b)" for name in _COMPARISONS if name not in ("eq", "ne")},
            **{f"{name}_tensor_": f"a.clone().{name}_(a + b.round())" for name in ("eq", "ne")},
            "copysign": "torch.copysign(a, b)",
            "logaddexp": "torch.logaddexp(a, b)",
            "pow_of_two": "torch.pow(a.abs() + 1, b)",
            "fmod": "torch.fmod(a, b.detach().abs() + 0.3)",
            "remainder": "torch.remainder(a, b.detach().abs() + 0.3)",
            "ldexp": "torch.ldexp(a, b.detach().round())",
            "logical_xor": "torch.logical_xor(a > 0, b > 0)",
            "logical_or": "torch.logical_or(a > 0, b > 0)",
            "masked_fill_tensor": "a.masked_fill(b > 0, b.detach().flatten()[0])",
            "true_divide": "torch.true_divide(a, b.abs() + 1)",
            "igamma": "torch.igamma(a.detach().abs() + 1, b.detach().abs())",
            "zeta": "torch.special.zeta(a.detach().abs() + 1.5, b.detach().abs() + 1)",
            "xlog1py": "torch.special.xlog1py(a, b.abs())",
            "atan2_": "a.clone().atan2_(b)",
            "clamp_tensor_": "a.clone().clamp_(max=b)",
            "lerp_tensor_": "a.clone().lerp_(b, b)",
            "pow_": "(a.abs() + 1).pow_(b)",
            "hypot_": "(a + 3).hypot_(b)",
            "xlogy_": "a.clone().xlogy_(b.abs() + 1)",
            "floor_divide": "a.detach() // (b.detach().abs() + 0.3)",
            "is_same_size": "torch.is_same_size(a, b)",
            "cross_products": "torch.linalg.cross(a.unflatten(-1, (-1, 3)), b.unflatten(-1, (-1, 3)))",
        },
        arguments=(OTHER,),
        shapes=ONE,
        drawn=False,
    ),
    *operations(
        {name: call.format(a="a.detach()", b="b.detach()") for name, call in _OUT.items()},
        arguments=(OTHER,),
        shapes=ONE,
        drawn=False,
    ),
    *operations(
        {
            "mask_and": "b & (a > 0)",
            "mask_or_": "b.clone().logical_or_(a > 0)",
            "mask_any": "(b & (a > 0.8)).any()",
            "mask_sum": "b.sum(0)",
            "mask_mean": "(a * b).sum() / b.sum()",
            "mask_nonzero_count": "torch.count_nonzero(b)",
        },
        arguments=(Argument(shapes=(first_shape,), kind=ArgumentKind.MASK),),
        shapes=ONE,
        drawn=False,
    ),
)
