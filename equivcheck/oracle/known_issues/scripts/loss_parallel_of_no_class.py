"""With five classes on four ranks, the last rank holds none. It skips the maximum over ranks, so its sum meets the others'
maximum. It then looks for the label among no classes.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy


def main() -> None:
    """Compute a vocabulary-parallel loss with five classes on four ranks."""
    mesh = init_device_mesh("cpu", (4,))
    logits, labels = torch.arange(5.0).view(1, 5), torch.tensor([4])
    spread = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel():
        loss = cross_entropy(spread, labels).to_local()
    print("rank", dist.get_rank(), "has", float(loss), "of", float(cross_entropy(logits, labels)))
    dist.barrier()
