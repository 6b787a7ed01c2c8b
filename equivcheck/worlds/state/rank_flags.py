"""Gives each rank its own values for flags kept by torch in C++ for the whole process.

Reading all flags takes as long as a switch between ranks. So while ranks run the setters are wrapped and record that a flag may
have changed; a run without such a call costs nothing. Private torch API, tested with torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

from equivcheck.worlds.replacing import Place, replace_attributes
from equivcheck.worlds.state.of_process import FLAGS, TORCH

_Values = tuple[Any, ...]

NAMESPACES = ("torch._C", "torch", "torch._C._functorch", "torch._C._distributed_c10d", "torch.distributed")
"""Modules with bindings for the setters."""
SETTERS = (
    *(setter for _, setter in FLAGS),
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "set_anomaly_enabled",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
    "_set_vmap_fallback_enabled",
    "set_debug_level",
    "set_debug_level_from_env",
)
"""Setters for the values read by the `TORCH` entries."""


class RankFlags:
    """Saves and restores the flags in `TORCH` when ranks take turns, so each rank has its own values."""

    def __init__(self) -> None:
        self._process: _Values | None = None
        self._setters: list[Place] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context ranks may change flags. On exit all flags have their earlier values."""
        self._process = None
        self._setters = self._setters or list(self._watched_setters())
        try:
            with replace_attributes(self._setters):
                yield
        finally:
            self.restore(self._process)

    def save(self) -> _Values | None:
        """Return the running rank's flags and reset them to the process's values; None if the rank has not changed a flag."""
        if self._process is None:
            return None
        values = _read()
        if values == self._process:
            return None
        self.restore(self._process)
        return values

    def restore(self, values: _Values | None) -> None:
        """Set the flags to the values returned by `save` for a rank, before this rank continues. None changes nothing."""
        if values is not None:
            for entry, value, now in zip(TORCH, values, _read(), strict=True):
                if value != now and entry.put is not None:
                    entry.put(value)

    def _watched_setters(self) -> Iterator[Place]:
        make = cache(self._watched)
        for module in map(sys.modules.__getitem__, NAMESPACES):
            yield from ((module, name, make) for name in SETTERS if name in vars(module))

    def _watched(self, setter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(setter)
        def set_and_record(*arguments: Any, **options: Any) -> Any:
            if self._process is None:
                self._process = _read()
            return setter(*arguments, **options)

        return set_and_record


def _read() -> _Values:
    return tuple([entry.read() for entry in TORCH])
