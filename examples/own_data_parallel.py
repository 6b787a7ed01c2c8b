"""A hand-written data-parallel wrapper that averages gradients in buckets, with a bug, and without.

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
    """Averages all gradients over ranks once the last one is there, a bucket of equally many numbers at a time."""

    bucket_size = 16

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.missing = len(self.trained)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.note)

    def forward(self, *inputs: Any) -> Any:
        """As the model's."""
        return self.model(*inputs)

    def note(self, _parameter: torch.Tensor) -> None:
        """One more gradient is there."""
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.trained)
            self.average()

    def average(self) -> None:
        """Average what is in every bucket."""
        gradients = [parameter.grad for parameter in self.trained]
        flat = nn.utils.parameters_to_vector(gradients)
        for start in self.starts(len(flat)):
            bucket = flat[start : start + self.bucket_size]
            dist.all_reduce(bucket)
            bucket /= dist.get_world_size()
        for gradient, average in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(average.view_as(gradient))

    def starts(self, length: int) -> range:
        """Where each bucket begins."""
        return range(0, length, self.bucket_size)


class TailLost(BucketedDataParallel):
    """The bug: only full buckets are averaged. Where all numbers fill buckets, it does not show."""

    def starts(self, length: int) -> range:
        """Where each bucket begins."""
        return range(0, length // self.bucket_size * self.bucket_size, self.bucket_size)


def check(wrapper: type[BucketedDataParallel]) -> Any:
    """A verdict on a wrapper, on 2 ranks: 8 x 6 + 6 + 6 x 3 + 3 = 75 numbers make 4 buckets of 16 and a tail of 11."""
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
    """Both verdicts."""
    print(check(TailLost).describe())
    print(check(BucketedDataParallel).describe())


if __name__ == "__main__":
    main()
