"""Private torch API for threads as ranks; tested with torch 2.9 to 2.15.

Four process-wide parts of torch are replaced, only while ranks run: ``_world`` of `torch.distributed`, because each rank needs
its own; thread isolation of the registry from group names to groups; the backend name under which groups are created; and the
function that creates groups, so that simulated groups appear as gloo's. `equivcheck.worlds.state.rank_variables` handles the
other state that differs between ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Never

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.sim.refusals import CallRefused

_BACKEND = "equivcheck_sim"
"""Backend name under which `torch.distributed` creates the ranks' groups."""

_PASSES_FOR = "gloo"
"""Backend name shown to programs. It is gloo's, because results equal gloo's."""

_TAKEN = (_PASSES_FOR, f"cpu:{_PASSES_FOR}", "undefined")
"""Backend names that programs may request: gloo, or none."""
_TALKS_TO_NOBODY = "fake"
"""Fake backend of torch, for groups that never communicate. torchtitan creates them for unused axes."""

GUARD_OF_ONE_THREAD = ">=2.10,<2.12"
"""Versions in which fake tensors share a device guard freed with the first thread to create one; the next use then
crashes."""

_bindings: Any = torch._C._distributed_c10d
HashStore: Any = _bindings.HashStore
Store: Any = _bindings.Store


class _ByGroup(dict[Any, Any]):
    """Values for one rank's groups. Looking up another rank's group raises `UsedByOtherRank`, not torch's unclear error."""

    def __contains__(self, group: Any) -> bool:
        _require_own(group)
        return super().__contains__(group)

    def get(self, group: Any, default: Any = None) -> Any:
        _require_own(group)
        return super().get(group, default)

    def __missing__(self, group: Any) -> Never:
        _require_own(group)
        raise KeyError(group)


def _require_own(group: Any) -> None:
    if hasattr(group, "require_own"):  # a simulated group
        group.require_own()


_OWN_FIELDS: dict[str, Callable[[], Any]] = {
    "default_pg": lambda: None,
    "pg_map": _ByGroup,
    "pg_names": dict,
    "pg_group_ranks": _ByGroup,
    "pg_backend_config": dict,
    "group_count": int,
    "tags_to_pg": dict,
    "pg_to_tag": dict,
    "pg_coalesce_state": dict,
    "comms": list,
    "pg_flight_recorder_hooks": dict,
}


class _ThreadWorlds(threading.local):
    """Replaces ``c10d._world``: each rank thread has its own fields, and all other threads see the original."""

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
    """Mark the calling thread as a rank. Its later operations and backward passes use no other thread."""
    _marks.is_rank = True
    torch.autograd.set_multithreading_enabled(False)  # else backward may run on threads that are no ranks
    torch.get_num_threads()  # takes the process's number for this thread, which would otherwise undo the next line later
    torch.set_num_threads(1)
    _marks.oldest = torch.zeros((), requires_grad=True) * 1


def keep_device_guard() -> None:
    """Create the CUDA device guard that fake tensors use, in the calling thread.

    If a rank thread created the guard, the guard would be freed when the rank thread ends.
    """
    if is_torch_in(GUARD_OF_ONE_THREAD):
        torch._C._ensureCUDADeviceGuardSet()


def drop_unfinished_backward() -> None:
    """Remove nodes that a failed backward pass left in the calling thread's autograd queue.

    Otherwise the nodes would keep tensors alive. They would be freed after the thread's end without the interpreter's lock, and
    the process would abort at exit. The queue returns newer nodes first and skips nodes of finished passes, so a backward through
    the oldest node empties the queue.
    """
    # `_marks.oldest` was made when the thread started, so its node is older than any of a program.
    leaf = _marks.oldest.grad_fn.next_functions[0][0].variable
    torch.autograd.grad(_marks.oldest, leaf, retain_graph=True)


def join_world(store: Any, rank: int, size: int) -> None:
    """Create the default group for the calling rank thread."""
    dist.init_process_group(_PASSES_FOR, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=1))


@contextlib.contextmanager
def keep_num_threads() -> Iterator[None]:
    """On exit, restore torch's number of compute threads for the process, which `prepare_rank_thread` changes."""
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
    """Inside this context, each rank thread has its own `torch.distributed`. `make_group` creates the process groups."""
    global _original_world  # noqa: PLW0603 - stands for a global of torch
    _original_world = c10d._world
    isolate = _bindings._set_thread_isolation_mode
    _register_backend(make_group)
    try:
        # Every function of torch.distributed reads its groups from this global.
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
    """Let ranks create simulated groups inside this context. Programs see the groups as gloo's."""
    original: Any = c10d._new_process_group_helper

    def make(
        size: int, rank: int, ranks: list[int], backend: str, store: Any, *arguments: Any, **options: Any
    ) -> tuple[Any, Any]:
        if not is_rank_thread() or backend == _TALKS_TO_NOBODY:
            return original(size, rank, ranks, backend, store, *arguments, **options)  # type: ignore[no-any-return]
        if backend not in _TAKEN:
            raise CallRefused(f"backend {backend!r} is not valid in a simulated world. Expected {_PASSES_FOR!r}.")
        group, store = original(size, rank, ranks, _BACKEND, getattr(store, "store", store), *arguments, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            store = group.complete(store, options.get("group_desc") or "undefined")
            c10d._world.pg_map[group] = (_PASSES_FOR, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(_PASSES_FOR)))
        return group, store

    try:
        # `init_process_group`, `new_group` and DeviceMesh all create groups through this helper.
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
    # `Backend.register_backend` cannot be undone and refuses a second registration, so its tables are written directly.
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
    """Return a context in which autograd, version counters and dispatch modes do not see writes to tensors.

    Real collectives write in the same way, because a network card writes directly to memory.
    """
    return torch._C._ExcludeDispatchKeyGuard(_HIDDEN)


def wait_for_result(tensor: Any) -> Any:
    """Return the result of a functional collective, after waiting for it. Everything else is returned unchanged.

    Torch's dispatcher does this before gloo gets the tensor. A process group written in Python is called directly.
    """
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-untyped-call]


def in_backward_node() -> bool:
    """Whether the calling thread is running a backward node or its hooks. False in callbacks, which run after all nodes."""
    return torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], Any]) -> None:
    """Call `callback` when the current backward pass has run all nodes. Callbacks queued later run after this one."""
    # DDP's reducer appends its own wait to the same queue.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def num_unwaited_works() -> int:
    """Return how many functional collectives the calling rank has called without waiting for them."""
    count = getattr(_bindings, "_get_work_registry_size", None)
    return int(count()) if count else 0
