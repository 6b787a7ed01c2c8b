"""Name, rank and size of a simulated process group."""

from __future__ import annotations

import threading
from typing import Any, Never, Self

import torch
import torch.distributed as dist

from equivcheck.worlds.sim.group.store import PatientStore
from equivcheck.worlds.sim.ownership import UsedByOtherRank
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.switchboard import Switchboard
from equivcheck.worlds.sim.torch_private import is_rank_thread

_ProcessGroup: Any = dist.ProcessGroup
_CPU = [torch.device("cpu")]


class GroupIdentity(_ProcessGroup):  # type: ignore[misc]  # torch's overloads differ from version to version
    """Base class with name, rank and size of a simulated process group.

    Its methods have the names by which torch 2.9 to 2.15 calls them.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    is_complete = False
    """Whether `torch.distributed` has registered the group. Until then it reports no devices, so torch attaches no flight
    recorder."""

    def __init__(self, board: Switchboard, global_rank: int, name: str, ranks: tuple[int, ...], member: int) -> None:
        super().__init__(member, len(ranks))
        self.board = board
        self.global_rank = global_rank
        self._name = name
        self.ranks = ranks
        self.member = member
        self._exchange = board.exchange(name, ranks)
        self._desc = "undefined"
        self._store: PatientStore | None = None
        self._thread = threading.get_ident()

    def require_own(self) -> None:
        """Raise `UsedByOtherRank` if the calling thread belongs to another rank than this group object."""
        if threading.get_ident() != self._thread and is_rank_thread():
            raise UsedByOtherRank("process group")

    def complete(self, store: Any, desc: str) -> PatientStore:
        """Mark the group as registered with torch, and return a store for torch to use instead of `store`.

        While a rank waits in `store`, no other rank could run.
        """
        self.is_complete = True
        self._desc = desc
        self._store = PatientStore(store, self.board, self.global_rank)
        return self._store

    def rank(self) -> int:
        """Rank of the caller within the group."""
        self.require_own()
        return self.member

    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def name(self) -> str:
        """Name of the backend for callers in Python. It is always ``gloo``, because results equal gloo's."""
        return "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend for torch's C++ code.

        If it were ``gloo``, C++ would read fields that only a real gloo group has.
        """
        return "equivcheck_sim"

    @property
    def group_name(self) -> str:
        """Name of the process group, by which torch finds it."""
        self.require_own()
        return self._name

    @property
    def group_desc(self) -> str:
        """The ``group_desc`` that was passed to `new_group`; ``undefined`` if none was passed."""
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        """Return `group_name`, for C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return `group_desc`, for C++."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return _CPU if self.is_complete else []

    def _get_backend(self, _device: torch.device) -> Self:
        return self

    def get_group_store(self) -> PatientStore | None:
        """Key-value store shared by the members."""
        return self._store

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        """Whether the group can allocate tensors itself; always False."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Number of the rank's calls on the group, including hidden calls."""
        return self._exchange.issued[self.member] + self._exchange.hidden[self.member]

    def _set_sequence_number_for_group(self) -> None:
        """No effect, because the number always begins at 0."""

    def shutdown(self) -> None:
        """Do nothing, because the group holds no connections."""

    abort = shutdown

    # In torch, these look for a backend inside the group, and end the process if there is none.

    def split_group(self, *_: Any, **__: Any) -> Never:
        """Raise `CallRefused`, because simulated groups cannot be split."""
        raise CallRefused("split_group: splitting a simulated group is not supported: use new_group, or run over gloo.")

    def merge_remote_group(self, *_: Any, **__: Any) -> Never:
        """Raise `CallRefused`, because simulated groups cannot be merged."""
        raise CallRefused("merge_remote_group: merging simulated groups is not supported: run over gloo.")

    splitGroup = split_group  # noqa: N815
    mergeRemoteGroup = merge_remote_group  # noqa: N815
