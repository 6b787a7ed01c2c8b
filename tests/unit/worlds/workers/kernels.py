"""A worker that has oneDNN make compile kernels, and then prints which it has to compile anew."""

from __future__ import annotations

import torch
from torch.backends.mkldnn import VERBOSE_ON_CREATION, verbose
from torch.nn.functional import gelu

from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """The task is how many kernels; then the last of them and the first are asked for again, with oneDNN's remarks."""
    num_kernels = SupervisorLink(fd).task
    for width in range(2, num_kernels + 2):
        gelu(torch.zeros(1, width))
    with verbose(VERBOSE_ON_CREATION):
        gelu(torch.zeros(1, num_kernels + 1))
        gelu(torch.zeros(1, 2))
