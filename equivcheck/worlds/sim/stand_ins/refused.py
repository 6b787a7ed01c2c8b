"""Refuses parts of torch that rank threads cannot use, because they change the process or start threads of their own.

Private torch API, tested with torch 2.9 to 2.15. Missing names are skipped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from equivcheck.worlds.replacing import Place
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.torch_private import is_rank_thread

_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel"
REFUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "context parallelism: a simulated rank is not supported: it replaces torch functions and sharding rules for the process, "
    "which simulated ranks share. Run over gloo.": {
        f"{_CONTEXT_PARALLEL}._attention": ("_enable_context_parallel_dispatcher_impl", "_enable_cp_dtensor_dispatcher"),
        f"{_CONTEXT_PARALLEL}._sharding_rules": ("register_cp_sharding_rules",),
        "torch.distributed.tensor.experimental._attention": ("_enable_cp_dispatcher",),
    },
    "async_save: a simulated rank is not supported: it writes from another thread or process, which sees no simulated rank, "
    "so the shards of other ranks are lost. Use save, or run over gloo.": {
        "torch.distributed.checkpoint._async_thread_executor": ("_ThreadBasedAsyncCheckpointExecutor.execute_save",),
        "torch.distributed.checkpoint._async_process_executor": ("_ProcessBasedAsyncCheckpointExecutor.execute_save",),
    },
}
"""Refused functions and methods by module, keyed by the error text."""


ONE_AT_A_TIME: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "forward-mode differentiation: a second simulated rank is not supported: the process has one level, "
    "and another rank is in it. Use one rank at a time, or run over gloo.": {
        "torch._C": ("_enter_dual_level",),
        "torch._functorch.predispatch": ("_enter_dual_level",),
    },
}
"""Functions with a `RuntimeError` if another rank is already inside, keyed by the error text."""


@functools.lru_cache(maxsize=1)
def places(_num_modules: int) -> tuple[Place, ...]:
    """Return a replacement for each torch function forbidden in rank threads. The replacement raises `CallRefused`.

    The result is cached. The argument is the number of imported modules, so further imports renew the result.
    """
    tables = ((_refusing, REFUSED), (_refusing_second, ONE_AT_A_TIME))
    return tuple(
        (owner, name, functools.cache(functools.partial(make, text)))
        for make, table in tables
        for text, modules in table.items()
        for owner, name in _found(modules)
    )


def _found(modules: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[Any, str]]:
    for module, paths in modules.items():
        for path in paths if module in sys.modules else ():
            *owners, name = path.split(".")
            owner: Any = functools.reduce(getattr, owners, sys.modules[module])
            if name in vars(owner):
                yield owner, name


def _refusing(text: str, original: Any) -> Any:
    @functools.wraps(original)
    def refuse(*arguments: Any, **options: Any) -> Any:
        if is_rank_thread():
            raise CallRefused(text)
        return original(*arguments, **options)

    return refuse


def _refusing_second(text: str, original: Any) -> Any:
    @functools.wraps(original)
    def refuse(*arguments: Any, **options: Any) -> Any:
        try:
            return original(*arguments, **options)
        except RuntimeError as error:
            if is_rank_thread():
                raise CallRefused(text) from error
            raise

    return refuse
