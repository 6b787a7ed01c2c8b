"""A hand-written data-parallel wrapper that averages gradients in buckets, once with a bug and once without.

Run it with ``python examples/own_data_parallel.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from equivcheck import check_training


class BucketedDataParallel(nn.Module):
    """Averages all gradients over ranks in buckets with `bucket_size` elements, after the last gradient is ready."""

    bucket_size = 16

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.missing = len(self.trained)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.note)

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def note(self, _parameter: torch.Tensor) -> None:
        """Count one more gradient, and average after the last."""
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.trained)
            self.average()

    def average(self) -> None:
        """Average all buckets over ranks."""
        gradients = [parameter.grad for parameter in self.trained]
        flat = nn.utils.parameters_to_vector(gradients)
        for start in self.starts(len(flat)):
            bucket = flat[start : start + self.bucket_size]
            dist.all_reduce(bucket)
            bucket /= dist.get_world_size()
        for gradient, average in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(average.view_as(gradient))

    def starts(self, length: int) -> range:
        """Offset of each bucket."""
        return range(0, length, self.bucket_size)


class TailLost(BucketedDataParallel):
    """Bug: averages only full buckets. If the gradients fill all buckets exactly, nothing goes wrong."""

    def starts(self, length: int) -> range:
        return range(0, length // self.bucket_size * self.bucket_size, self.bucket_size)


def check(wrapper: type[BucketedDataParallel]) -> Any:
    """Check a wrapper on 2 ranks. Its 8 x 6 + 6 + 6 x 3 + 3 = 75 gradient elements fill 4 buckets with 16 each and leave 11."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(3)]
    return check_training(
        model=lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
        parallelize=lambda model, _mesh: wrapper(model),
        mesh={"dp": 2},
        batches=batches,
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def main() -> None:
    """Print the verdict with the bug, then without."""
    print(check(TailLost).describe())
    print(check(BucketedDataParallel).describe())


if __name__ == "__main__":
    main()
