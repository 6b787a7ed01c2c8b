"""State in torch and Python that all threads in a process share.

Uses private torch API if there is no public getter; tested with torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from equivcheck.worlds.state.entry import Entry

_dist: Any = dist
_functorch: Any = torch._C._functorch
_fill: Any = torch.utils.deterministic
_numpy: Any = np.random

FLAGS = (
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_qengine", "_set_qengine"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    ("_get_autograd_fallback_mode", "_set_autograd_fallback_mode"),
    ("_get_backcompat_broadcast_warn", "_set_backcompat_broadcast_warn"),
    ("_get_backcompat_keepdim_warn", "_set_backcompat_keepdim_warn"),
    ("_get_warnAlways", "_set_warnAlways"),
)
"""Flags of the process: getter and setter in `torch._C`. Missing names are skipped."""

_GETTERS, _SETTERS = zip(*[(get, put) for get, put in FLAGS if hasattr(torch._C, get) and hasattr(torch._C, put)], strict=True)
_READS = tuple(getattr(torch._C, name) for name in _GETTERS)

_PRECISIONS = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
)
"""Backends and operations with a float32 precision setting in torch."""

_KEY_BYTES, _POSITION_BYTES = 4 * 624, 4
"""Sizes in bytes of the key and of the position in NumPy's Mersenne twister."""


def _flags() -> tuple[Any, ...]:
    return tuple([read() for read in _READS])


def _put_flags(flags: tuple[Any, ...]) -> None:
    for setter, old, new in zip(_SETTERS, flags, _flags(), strict=True):
        if old != new:
            getattr(torch._C, setter)(old)


def _float32_precision() -> tuple[str | None, ...]:
    """Return the overall setting for matrix products, None if backends differ; then the setting of each backend and operation."""
    try:
        word = torch._C._get_float32_matmul_precision()
    except RuntimeError:
        word = None
    return word, *[torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS]


def _put_float32_precision(precision: tuple[str | None, ...]) -> None:
    word, *each = precision
    if word is not None:
        torch.set_float32_matmul_precision(word)
    for place, one in zip(_PRECISIONS, each, strict=True):
        torch._C._set_fp32_precision_setter(*place, one)  # type: ignore[arg-type]


def _put_fill(fill: bool) -> None:
    _fill.fill_uninitialized_memory = fill


TORCH = (
    Entry(name="default element type", read=torch.get_default_dtype, put=torch.set_default_dtype),
    Entry(
        name="deterministic algorithms",
        read=torch.get_deterministic_debug_mode,
        put=torch.set_deterministic_debug_mode,
    ),
    Entry(
        name="filling of uninitialized memory",
        read=torch._C._get_deterministic_fill_uninitialized_memory,
        put=_put_fill,
    ),
    Entry(
        name="anomaly detection",
        read=lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        put=lambda flags: torch.autograd.set_detect_anomaly(*flags),
    ),
    Entry(name="precision of float32 matrix products", read=_float32_precision, put=_put_float32_precision),
    Entry(name="choice of implementations (oneDNN, NNPACK, cuDNN, attention), checks and warnings", read=_flags, put=_put_flags),
    Entry(
        name="fallback of vmap",
        read=_functorch._is_vmap_fallback_enabled,
        put=_functorch._set_vmap_fallback_enabled,
    ),
    Entry(name="debug level of torch.distributed", read=_dist.get_debug_level, put=_dist.set_debug_level),
)


def _environment() -> dict[bytes, bytes]:
    """Return all variables at once, a hundred times faster than through `os.environ`."""
    variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return variables.copy()


def _put_environment(environment: Mapping[bytes, bytes]) -> None:
    for name in [name for name in os.environb if name not in environment]:
        del os.environb[name]
    os.environb.update(environment)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _put_working_directory(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _put_warning_filters(saved: tuple[list[Any], tuple[Any, ...]]) -> None:
    filters, entries = saved
    warnings.filters = filters
    warnings.resetwarnings()
    filters[:] = entries


def _put_import_path(path: tuple[str, ...]) -> None:
    sys.path[:] = path


def _put_collector(settings: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, threshold = settings
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)


def _numpy_generator() -> Any:
    """Return the generator's memory, because `numpy.random.get_state` takes as long as a hundred other entries."""
    generator: Any = _numpy.get_bit_generator()
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES + _POSITION_BYTES)
    return repr(generator.state)


PYTHON = (
    Entry(name="environment variables", read=_environment, put=_put_environment),
    Entry(name="working directory", read=_working_directory, put=_put_working_directory),
    Entry(
        name="warning filters",
        read=lambda: (warnings.filters, tuple(warnings.filters)),
        put=_put_warning_filters,
    ),
    Entry(name="import path", read=lambda: tuple(sys.path), put=_put_import_path),
    Entry(name="generator of random", read=random.getstate, put=random.setstate),
    Entry(name="generator of numpy.random", read=_numpy_generator, put=np.random.set_state, copy=np.random.get_state),
    Entry(name="recursion limit", read=sys.getrecursionlimit, put=sys.setrecursionlimit),
    Entry(name="garbage collection", read=lambda: (gc.isenabled(), gc.get_threshold()), put=_put_collector),
)

OF_PROCESS = TORCH + PYTHON
"""All entries that threads share."""
