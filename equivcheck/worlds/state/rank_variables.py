"""Gives each rank its own copy of torch's process-wide state.

Rank threads share one process, but per-thread state of torch already belongs to a rank. `equivcheck.worlds.sim.torch_private`
separates process groups, and `equivcheck.worlds.sim.mesh_private` separates caches keyed by a mesh. The remaining state is in the
table below (variables) and in `rank_flags` (flags in C++): saved when a rank passes the baton and restored when it continues.
Private torch API, tested with torch 2.9 to 2.15; missing names are skipped.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch

from equivcheck.worlds.state.rank_flags import RankFlags

VARIABLES: Mapping[str, tuple[str, ...]] = {
    # the excepthook and the last group's name, which `init_process_group` assigns, and where programs print
    "sys": ("excepthook", "stdout", "stderr"),
    "torch.distributed.distributed_c10d": ("_backend", "_default_pg_init_method"),
    # how modules take over parameters
    "torch.__future__": ("_overwrite_module_params_on_conversion", "_swap_module_params_on_conversion"),
    "torch.distributed": ("_breakpoint_cache",),
    "torch.distributed._symmetric_memory": (
        "_is_test_mode",
        "_mocked_group_names",
        "_use_implicit_mempool",
        "_group_name_to_store",
    ),
    "torch.distributed._local_tensor": ("_PROCESS_MODE", "_PROCESS_LOCAL_TENSOR_MODE", "_LOCAL_RUNNER_MODE"),
    # replaced by `LocalTensorMode` in torch 2.10 while it is entered
    "torch.distributed.device_mesh": ("DeviceMesh.get_coordinate", "DeviceMesh.get_local_rank", "DeviceMesh.get_rank"),
    # hooks that are called for every module and every optimizer
    "torch.nn.modules.module": (
        "_global_buffer_registration_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_is_full_backward_hook",
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    # switched by a context manager while it is entered
    "torch.nn.utils.parametrize": ("_cache_enabled", "_cache"),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.utils.checkpoint": (
        "_enable_checkpoint_early_stop",
        "_checkpoint_debug_enabled",
        "DefaultDeviceType._default_device_type",
    ),
    "torch.autograd.profiler": ("KinetoStepTracker._current_step", "KinetoStepTracker._step_dict"),
    "torch._ops": (
        "_mode_stack_state_for_pre_dispatch._ModeStackStateForPreDispatch__infra_modes",
        "_mode_stack_state_for_pre_dispatch._schema_check_mode",
    ),
    "torch.autograd.graph": ("_allow_mutation_on_saved_tensors_enabled",),
    "torch.utils._python_dispatch": (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    ),
    "torch.nn.parallel.distributed": ("DistributedDataParallel._active_ddp_module",),
    "torch.distributed.fsdp.wrap": (
        "_ConfigAutoWrap.in_autowrap_context",
        "_ConfigAutoWrap.wrapper_cls",
        "_ConfigAutoWrap.kwargs",
    ),
    "torch.distributed._shard.api": ("_CURRENT_PROCESS_GROUP",),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("_enable_fsdp_module_new_init",),
    "torch.distributed.tensor._redistribute": (
        "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "_warned_flatten_issues",
    ),
    "torch.distributed.tensor._random": ("_rng_tracker",),
    # changed by `loss_parallel` when a rank enters and leaves it
    "torch.distributed.tensor": ("DTensor._op_dispatcher._custom_op_handlers",),
    # set by FSDP1 over tensor parallelism; and its timer for state dicts (two at once are an error)
    "torch.distributed.fsdp._fsdp_extensions": ("_extensions",),
    "torch.distributed.fsdp._debug_utils": ("SimpleProfiler.results", "SimpleProfiler.profiling"),
    # plans of checkpoints, by the name of the saved object
    "torch.distributed.checkpoint.planner": (
        "SavePlanner._cached_save_plan",
        "SavePlanner._cached_final_save_plan",
        "SavePlanner._cached_all_plans",
        "SavePlanner._cached_global_plan",
        "SavePlanner._cached_metadata",
    ),
    "torch.distributed.checkpoint._version": ("_derived_version",),
}
"""Variables by module, as dotted paths. A rank starts with copies of the process's containers and shares other values."""

Saved = tuple[torch.Tensor, tuple[Any, ...] | None, tuple[Any, ...] | None]
"""A rank's generator state, variables and flags; None for variables or flags equal to the process's."""


class RankVariables:
    """Saves and restores torch's global variables when ranks take turns, so each rank has its own values.

    Ranks rarely change a variable, so usually one comparison shows that nothing must be saved. Each rank starts with the
    process's values. Containers are copied, because a rank may change them in place. If a rank imports a module, the module's
    variables are added when the next rank takes its turn.
    """

    def __init__(self) -> None:
        self._places: list[tuple[Any, str]] = []
        self._namespaces: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._process: tuple[Any, ...] = ()
        self._untouched: tuple[Any, ...] = ()
        self._num_modules = 0
        self._flags = RankFlags()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context ranks may change variables. On exit all variables have their earlier values."""
        self._process = self._untouched = ()
        self._find()
        generator = torch.default_generator.get_state()
        try:
            self._put(map(_own, self._untouched))
            with self._flags.kept():
                yield
        finally:
            self._put(self._process)
            torch.default_generator.set_state(generator)

    def save(self) -> Saved:
        """Return the running rank's random generator state, variables and flags.

        Then reset variables and flags to the process's values, for the next rank.
        """
        if len(sys.modules) != self._num_modules:
            self._find()
        generator, values, flags = torch.default_generator.get_state(), self._values(), self._flags.save()
        if values == self._untouched:
            return generator, None, flags
        self._put(map(_own, self._untouched))
        return generator, values, flags

    def restore(self, saved: Saved) -> None:
        """Set generator state, variables and flags to those returned by `save` for a rank, before it continues.

        Call `save` for the previous rank first.
        """
        generator, values, flags = saved
        torch.default_generator.set_state(generator)
        self._flags.restore(flags)
        if values is not None:
            self._put(values)

    def _values(self) -> tuple[Any, ...]:
        return tuple(map(getitem, self._namespaces, self._names))

    def _put(self, values: Iterable[Any]) -> None:
        for (owner, name), namespace, value in zip(self._places, self._namespaces, values, strict=False):
            if namespace[name] is not value:
                setattr(owner, name, value)

    def _find(self) -> None:
        """Add variables of newly imported modules, with their current values."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._places += [place for place in _places() if place not in self._places]
            self._namespaces = [vars(owner) for owner, _ in self._places]
            self._names = [name for _, name in self._places]
        self._process += self._values()[len(self._process) :]
        self._untouched += tuple(map(_own, self._process[len(self._untouched) :]))


def _places() -> Iterator[tuple[Any, str]]:
    """Yield owner and name of each variable that exists."""
    for module, paths in VARIABLES.items():
        for path in paths:
            owner: Any = sys.modules.get(module)
            *owners, name = path.split(".")
            for part in owners:
                owner = getattr(owner, part, None)
            if name in getattr(owner, "__dict__", ()):
                yield owner, name


def _own(value: Any) -> Any:
    """Return the value for a new rank; containers are copied."""
    return copy.copy(value) if isinstance(value, (dict, set, list)) else value
