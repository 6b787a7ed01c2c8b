"""The private torch API that ranks as threads need; tried on torch 2.9 to 2.15.

Four process-wide things are changed while ranks run, and only then: the ``_world`` of `torch.distributed` (each rank sees its
own), thread isolation of the registry that maps group names to groups, the backend name under which groups are made, and the
function that makes groups, so that those of ranks pass for gloo's. What else differs from rank to rank is in
`equivcheck.worlds.state.rank_variables`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.system.torch_version import torch_in
from equivcheck.worlds.sim.refusals import CallRefused

_BACKEND = "equivcheck_sim"
"""Name of the backend that makes the groups of ranks, as `torch.distributed` knows it while ranks run."""

_PASSES_FOR = "gloo"
"""Name of the backend that programs see, since ranks compute what they would compute there."""

_TAKEN = (_PASSES_FOR, f"cpu:{_PASSES_FOR}", "undefined")
"""Names under which programs may ask for a group: gloo's, and none at all."""
_TALKS_TO_NOBODY = "fake"
"""Backend of groups that are never to communicate, as torchtitan makes them for axes that it does not use; torch's own."""

GUARD_OF_ONE_THREAD = ">=2.10,<2.12"
"""Fake tensors share a device guard that is freed with the thread which first made one: then the next to make one crashes."""

_bindings: Any = torch._C._distributed_c10d
HashStore: Any = _bindings.HashStore

_OWN_FIELDS: dict[str, Callable[[], Any]] = {
    "default_pg": lambda: None,
    "pg_map": dict,
    "pg_names": dict,
    "pg_group_ranks": dict,
    "pg_backend_config": dict,
    "group_count": int,
    "tags_to_pg": dict,
    "pg_to_tag": dict,
    "pg_coalesce_state": dict,
    "comms": list,
    "pg_flight_recorder_hooks": dict,
}


class _ThreadWorlds(threading.local):
    """Stands in for ``c10d._world``: a rank thread has fields of its own, every other thread sees the original."""

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_FIELDS and is_rank_thread():
            self.__dict__.update((field, make()) for field, make in _OWN_FIELDS.items())
            return self.__dict__[name]
        if name == "pg_config_info" and is_rank_thread():
            return c10d._World.pg_config_info.fget(self)  # type: ignore[attr-defined]
        return getattr(_original_world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if is_rank_thread():
            self.__getattr__("default_pg") if not self.__dict__ else None
            self.__dict__[name] = value
        else:
            setattr(_original_world, name, value)


_marks = threading.local()
_original_world: Any = c10d._world
_thread_worlds = _ThreadWorlds()


def prepare_rank_thread() -> None:
    """Mark the calling thread as a rank, and let it compute and differentiate alone."""
    _marks.is_rank = True
    torch.autograd.set_multithreading_enabled(False)
    torch.get_num_threads()  # takes the process's number for this thread, which would otherwise undo the next line later
    torch.set_num_threads(1)
    _marks.oldest = torch.zeros((), requires_grad=True) * 1


def keep_device_guard() -> None:
    """Have the calling thread, which outlives ranks, make what fake tensors share; a rank thread would free it when it ends."""
    if torch_in(GUARD_OF_ONE_THREAD):
        torch._C._ensureCUDADeviceGuardSet()


def drop_unfinished_backward() -> None:
    """Take what a backward pass that raised has left out of the calling thread's queue.

    There it would keep its tensors alive, and be dropped when the thread has ended, without the interpreter's lock: at exit that
    aborts the process. The queue gives out newer nodes first, and skips those whose pass is over: so the oldest is asked for.
    """
    leaf = _marks.oldest.grad_fn.next_functions[0][0].variable
    torch.autograd.grad(_marks.oldest, leaf, retain_graph=True)


def join_world(store: Any, rank: int, size: int) -> None:
    """Give the calling rank thread its default group."""
    dist.init_process_group(_PASSES_FOR, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=1))


@contextlib.contextmanager
def keep_num_threads() -> Iterator[None]:
    """Undo what `prepare_rank_thread` does to the number of threads that other threads of the process compute with."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def is_rank_thread() -> bool:
    """Whether the calling thread was prepared as a rank."""
    return hasattr(_marks, "is_rank")


@contextlib.contextmanager
def separate_worlds(make_group: Callable[[Any, Any], Any]) -> Iterator[None]:
    """While entered, each rank thread has a `torch.distributed` of its own, whose groups `make_group` makes."""
    global _original_world  # noqa: PLW0603 - stands for a global of torch
    _original_world = c10d._world
    isolate = _bindings._set_thread_isolation_mode
    _register_backend(make_group)
    try:
        c10d._world = _thread_worlds  # type: ignore[assignment]
        isolate(True)
        with _groups_pass_for_gloo():
            yield
    finally:
        isolate(False)
        c10d._world = _original_world
        _unregister_backend()


@contextlib.contextmanager
def _groups_pass_for_gloo() -> Iterator[None]:
    """While entered, the groups of ranks are made by the simulated backend, and are gloo's for whoever asks."""
    original: Any = c10d._new_process_group_helper

    def make(
        size: int, rank: int, ranks: list[int], backend: str, store: Any, *arguments: Any, **options: Any
    ) -> tuple[Any, Any]:
        if not is_rank_thread() or backend == _TALKS_TO_NOBODY:
            return original(size, rank, ranks, backend, store, *arguments, **options)  # type: ignore[no-any-return]
        if backend not in _TAKEN:
            raise CallRefused(f"a group of backend {backend!r}: allowed in a simulated world is {_PASSES_FOR!r}")
        group, store = original(size, rank, ranks, _BACKEND, getattr(store, "store", store), *arguments, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            store = group.complete(store, options.get("group_desc") or "undefined")
            c10d._world.pg_map[group] = (_PASSES_FOR, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(_PASSES_FOR)))
        return group, store

    try:
        c10d._new_process_group_helper = make  # type: ignore[assignment]
        yield
    finally:
        c10d._new_process_group_helper = original


def _register_backend(make_group: Callable[[Any, Any], Any]) -> None:
    backend: Any = dist.Backend
    setattr(backend, _BACKEND.upper(), _BACKEND)
    backend.backend_list.append(_BACKEND)
    backend.backend_type_map[_BACKEND] = dist.ProcessGroup.BackendType.CUSTOM
    backend.backend_capability[_BACKEND] = ["cpu"]
    backend._plugins[_BACKEND.upper()] = backend._BackendPlugin(make_group, True)


def _unregister_backend() -> None:
    backend: Any = dist.Backend
    delattr(backend, _BACKEND.upper())
    backend.backend_list.remove(_BACKEND)
    del backend.backend_type_map[_BACKEND]
    del backend.backend_capability[_BACKEND]
    del backend._plugins[_BACKEND.upper()]


_HIDDEN = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
for _key in ("ADInplaceOrView", "Python", "PythonTLSSnapshot"):
    _HIDDEN = _HIDDEN | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))


def raw_memory() -> Any:
    """A guard under which torch acts as a network card would: unseen by autograd, version counters and dispatch modes."""
    return torch._C._ExcludeDispatchKeyGuard(_HIDDEN)


def in_backward_node() -> bool:
    """Whether the calling thread is inside a node of a backward pass (or its hooks), not in what is called after all nodes."""
    return torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], Any]) -> None:
    """Call `callback` when the current backward pass has run its nodes, before callbacks that are queued later."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def num_unwaited_works() -> int:
    """How many results of functional collectives of the calling rank nobody has waited for."""
    count = getattr(_bindings, "_get_work_registry_size", None)
    return int(count()) if count else 0
