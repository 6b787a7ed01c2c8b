"""Under ``loss_parallel`` a rank that holds no class leaves out a collective and then raises, while the others wait for it.

Of five classes on four ranks the last holds none. It does not take part in the maximum over ranks, so that its sum meets the
maximum of the others; then it looks for the label among no classes at all.

    torchrun --standalone --nproc-per-node 4 loss_parallel_of_no_class.py

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
    """Compute the loss of one row."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    mesh = init_device_mesh("cpu", (4,))
    logits, labels = torch.arange(5.0).view(1, 5), torch.tensor([4])
    spread = distribute_tensor(logits, mesh, [Shard(1)])
    found = 0
    try:
        with loss_parallel():
            loss = cross_entropy(spread, labels).to_local()
        print("rank", dist.get_rank(), "has", float(loss), "of", float(cross_entropy(logits, labels)))
        dist.barrier()
    except RuntimeError as error:
        print("rank", dist.get_rank(), type(error).__name__, error)
        found = 1
    return found


if __name__ == "__main__":
    sys.exit(main())
