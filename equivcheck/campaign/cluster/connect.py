"""The way to a cluster, by its address."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from equivcheck.campaign.cluster.crew import ClusterCrew
from equivcheck.campaign.cluster.orders import Wanted
from equivcheck.errors import UsageError
from equivcheck.worlds.workers.process import WorkerProcess

_HOST_AND_PORT = re.compile(r"(?!.*//)\S+:[0-9]{1,5}")


def connect_ray(address: str, num_workers: int | None = None) -> ClusterCrew:
    """The nodes of a Ray cluster, with so many workers on each, or one per core.

    Raises `UsageError` for no address, and where Ray is not installed; `ClusterFailed` where there is no cluster to be used.
    """
    if address != "auto" and not _HOST_AND_PORT.fullmatch(address):
        raise UsageError(f"Ray address {address[:80]!r} is none; allowed: auto, or the HOST:PORT of a cluster's head")
    try:
        version("ray")
    except PackageNotFoundError:
        raise UsageError('a campaign on Ray needs ray, which is not installed; allowed: pip install "equivcheck[ray]"') from None
    wanted = Wanted(address=address, num_workers=num_workers)
    return ClusterCrew(WorkerProcess("equivcheck.campaign.cluster.on_ray", wanted), address)
