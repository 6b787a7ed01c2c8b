"""It looks up the class weight of each label, including -100, which is no class. The forward uses class 0 instead."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy


def main() -> None:
    """Compute gradients of a vocabulary-parallel loss with class weights and one ignored label."""
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)]).requires_grad_()
    labels, weights = torch.tensor([3, -100]), torch.linspace(0.5, 1.5, 4)
    with loss_parallel():
        loss = cross_entropy(logits, labels, weight=weights, reduction="sum")
        loss.backward()
