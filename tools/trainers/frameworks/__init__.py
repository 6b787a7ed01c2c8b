"""Frameworks in the matrix of versions, by the name on the command line. Their modules import no framework."""

from __future__ import annotations

from tools.trainers.frameworks.deepspeed import DEEPSPEED
from tools.trainers.frameworks.lightning import LIGHTNING
from tools.trainers.frameworks.megatron import MEGATRON
from tools.trainers.frameworks.torchtitan import TORCHTITAN
from tools.trainers.frameworks.transformers import TRANSFORMERS
from tools.trainers.frameworks.trl import TRL_TRAINERS
from tools.trainers.rows import Framework

FRAMEWORKS: dict[str, Framework] = {
    "deepspeed": DEEPSPEED,
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
    "transformers": TRANSFORMERS,
    "trl": TRL_TRAINERS,
}
"""Frameworks by name."""
