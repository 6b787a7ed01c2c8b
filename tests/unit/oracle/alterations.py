"""What is done to the setup of a rank; in a module of its own, as processes import it by name."""

import os
import signal

import torch.distributed as dist

from equivcheck.training.setup import Setup


def double_the_gradients(setup: Setup) -> None:
    """Make every rank's gradients twice as large."""
    setup.loss_scale *= 2
    setup.before_update.append(lambda optimizer, step: _scale(setup, 2.0))


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


def nudge_the_gradients(setup: Setup) -> None:
    """Change every rank's gradients in the tenth digit."""
    setup.before_update.append(lambda optimizer, step: _scale(setup, 1 + 1e-10))


def _scale(setup: Setup, factor: float) -> None:
    for parameter in setup.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
