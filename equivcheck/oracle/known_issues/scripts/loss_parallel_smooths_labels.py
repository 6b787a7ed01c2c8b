"""`loss_parallel` does not support it, but torch 2.10 does not refuse it, and the loss is right. The backward of `log_softmax`
passes its input on as the gradient of the logits, which lacks the part of all classes.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy


def main() -> float:
    """Compare the gradient on one device with the gradient if logits are sharded by classes."""
    mesh = init_device_mesh("cpu", (2,))
    whole, labels = torch.arange(8.0).view(2, 4).requires_grad_(), torch.tensor([3, 0])
    cross_entropy(whole, labels, reduction="sum", label_smoothing=0.1).backward()

    spread = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        labels = DTensor.from_local(labels, mesh, [Replicate()])
        cross_entropy(spread, labels, reduction="sum", label_smoothing=0.1).backward()

    difference = float((spread.grad.full_tensor() - whole.grad).abs().max())
    return difference
