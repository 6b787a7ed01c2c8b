"""A worker that makes oneDNN compile kernels, and then prints the ones compiled again."""

from __future__ import annotations

import torch
from torch.backends.mkldnn import VERBOSE_ON_CREATION, verbose
from torch.nn.functional import gelu

from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """Compile `task` kernels, then request the last and the first again with oneDNN's log on."""
    num_kernels = SupervisorLink(fd).task
    for width in range(2, num_kernels + 2):
        gelu(torch.zeros(1, width))
    with verbose(VERBOSE_ON_CREATION):
        gelu(torch.zeros(1, num_kernels + 1))
        gelu(torch.zeros(1, 2))
