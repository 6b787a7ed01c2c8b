"""With weights of classes, the backward of a cross-entropy under ``loss_parallel`` raises where a label is to be ignored.

It looks up the weight of each label, and of one that is ignored, which is no class. The forward takes class 0 in its place.

    torchrun --standalone --nproc-per-node 2 loss_parallel_weights_of_ignored_labels.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy


def main() -> int:
    """Differentiate the loss of two rows, one of which does not count."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)]).requires_grad_()
    labels, weights = torch.tensor([3, -100]), torch.linspace(0.5, 1.5, 4)
    found = 0
    with loss_parallel():
        loss = cross_entropy(logits, labels, weight=weights, reduction="sum")
        try:
            loss.backward()
        except RuntimeError as error:
            print("rank", dist.get_rank(), type(error).__name__, error)
            found = 1
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.exit(main())
