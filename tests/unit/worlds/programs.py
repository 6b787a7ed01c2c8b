"""What ranks run; in a module of its own, as processes import it by name."""

import torch.distributed as dist


def rank_and_sum() -> tuple[int, int]:
    """This rank and the sum over all."""
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return dist.get_rank(), sum(gathered)
