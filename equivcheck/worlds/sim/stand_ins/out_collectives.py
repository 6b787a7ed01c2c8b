"""Functional collectives into a given output, because C++ calls them on a backend that simulated ranks do not have.

Private torch API, tested with torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from equivcheck.worlds.replacing import Place
from equivcheck.worlds.sim.torch_private import is_rank_thread

_bindings: Any = torch._C._distributed_c10d


@cache
def _gathering(original: Any) -> Callable[..., Any]:
    def gather(source: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
        if not is_rank_thread():
            gathered: torch.Tensor = original(source, size, group, out=out)
            return gathered
        members = _bindings._resolve_process_group(group) if isinstance(group, str) else group
        # The functional API waits for `out` through this registry.
        _bindings._register_work(out, members.all_gather_single(out, source))
        return out

    gather.default = gather  # type: ignore[attr-defined]
    return gather


PLACES: tuple[Place, ...] = ((torch.ops._c10d_functional, "all_gather_into_tensor_out", _gathering),)
