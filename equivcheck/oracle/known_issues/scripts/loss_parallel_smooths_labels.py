"""The gradient of a cross-entropy with ``label_smoothing`` is wrong under ``loss_parallel``, which does not support it.

Torch 2.10 does not refuse it: the loss is right. The backward of ``log_softmax``, though, hands on what it is given, as it takes
that for the gradient of the logits, which the backward of the labels' part has computed by then, but not that of all classes.

    torchrun --standalone --nproc-per-node 2 loss_parallel_smooths_labels.py

Exit code 1 when the difference shows. Seen on torch 2.10, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy


def main() -> int:
    """Compare the gradient on one device with that of logits that are cut by classes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))
    whole, labels = torch.arange(8.0).view(2, 4).requires_grad_(), torch.tensor([3, 0])
    cross_entropy(whole, labels, reduction="sum", label_smoothing=0.1).backward()

    spread = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        labels = DTensor.from_local(labels, mesh, [Replicate()])
        cross_entropy(spread, labels, reduction="sum", label_smoothing=0.1).backward()

    difference = float((spread.grad.full_tensor() - whole.grad).abs().max())
    if dist.get_rank() == 0:
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
