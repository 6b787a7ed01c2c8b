"""What is done to the setup of a rank; in a module of its own, as processes import it by name."""

import os
import signal

import torch.distributed as dist

from equivcheck.train.setup import Setup


def double_the_gradients(setup: Setup) -> None:
    """Make every rank's gradients twice as large."""
    setup.loss_scale *= 2
    setup.before_update.append(lambda optimizer, step: [p.grad.mul_(2) for p in setup.model.parameters()])  # type: ignore[union-attr]


def raise_on_rank_one(setup: Setup) -> None:
    """Raise on one rank before it communicates."""
    if dist.get_rank() == 1:
        raise RuntimeError("out of cheese")


def kill_rank_one(setup: Setup) -> None:
    """Kill the process of one rank before it communicates."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def spin_on_rank_one(setup: Setup) -> None:
    """Let one rank wait for what nobody sends."""
    if dist.get_rank() == 1:
        dist.barrier()
