"""Functions that break a rank's setup. They are in a module because processes import them by name."""

import os
import signal

import torch.distributed as dist

from equivcheck.training.setup import Setup


def double_the_gradients(setup: Setup) -> None:
    """Double every rank's gradients."""
    setup.loss_scale *= 2
    setup.before_update.append(lambda optimizer, step: _scale(setup, 2.0))


def raise_on_rank_one(setup: Setup) -> None:
    """Raise on rank 1 before it communicates."""
    if dist.get_rank() == 1:
        raise RuntimeError("out of cheese")


def kill_rank_one(setup: Setup) -> None:
    """Kill rank 1's process before it communicates."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def spin_on_rank_one(setup: Setup) -> None:
    """Let rank 1 wait for a message that nobody sends."""
    if dist.get_rank() == 1:
        dist.barrier()


def nudge_the_gradients(setup: Setup) -> None:
    """Change the tenth digit in every rank's gradients."""
    setup.before_update.append(lambda optimizer, step: _scale(setup, 1 + 1e-10))


def _scale(setup: Setup, factor: float) -> None:
    for parameter in setup.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
