"""Computes result shapes on meta tensors, in a tenth of the time of DTensor's fake tensors.

Private torch API, tested with torch 2.13.

For most operations a fake tensor runs the same meta kernel after much Python code. The Python code matters only for operations
that read values or whose strides depend on the device, and none of them is listed here.
"""

from __future__ import annotations

from typing import Any

import torch

UNKNOWN = object()
"""Marks a result that needs fake tensors."""

_NAMES = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _unsafe_view addmm amax amin bmm cat clone
    detach embedding embedding_dense_backward expand linalg_vector_norm logsumexp mean mm mse_loss mse_loss_backward
    native_layer_norm native_layer_norm_backward nll_loss_backward nll_loss_forward ones_like permute select
    select_backward slice slice_backward squeeze stack sum t transpose unsqueeze view zeros_like
"""
_OPERATIONS = frozenset(_NAMES.split())
"""Operations other than elementwise operations. Their meta kernels read only shapes, strides and element types."""
_VIEWS = ("_unsafe_view", "view")
"""Operations for which fake tensors choose other strides along dims with size 1."""
_OF_FAKE_TENSORS = ("_foreach_", "_fused_", "copy")
"""Name prefixes for elementwise operations with a special implementation for fake tensors."""


def answer_on_meta(schema: Any) -> Any:
    """Compute an operation on meta tensors.

    Return its result's sizes, strides and dtypes in the form in which DTensor caches them. `schema` is DTensor's description of
    the operation and its arguments. Returns `UNKNOWN` if this module does not cover the operation, or if the operation fails.
    """
    name = schema.op._schema.name.partition("::")[2]
    if not (name in _OPERATIONS or _is_elementwise(schema.op, name)):
        return UNKNOWN
    try:
        arguments = [_on_meta(value) for value in schema.args_schema]
        options = {option: _on_meta(value) for option, value in schema.kwargs_schema.items()}
        result = schema.op(*arguments, **options)
    except Exception:  # fake tensors raise what DTensor reports
        return UNKNOWN
    if name in _VIEWS and any(size < 2 for size in (*arguments[0].shape, *result.shape)):
        return UNKNOWN
    return _recorded(result)


def _is_elementwise(op: Any, name: str) -> bool:
    tags = op.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not name.startswith(_OF_FAKE_TENSORS)


def _on_meta(value: Any) -> Any:
    """Return an argument with each DTensor spec replaced by a meta tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    if not hasattr(value, "tensor_meta"):
        return value
    meta = value.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _recorded(result: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if isinstance(result, torch.Tensor):
        return TensorMeta(result.shape, result.stride(), result.dtype)
    return type(result)(map(_recorded, result)) if isinstance(result, (list, tuple)) else None
