"""Frameworks in the matrix of versions, by the name on the command line. Their modules import no framework."""

from __future__ import annotations

from tools.trainers.frameworks.deepspeed import DEEPSPEED
from tools.trainers.frameworks.lightning import LIGHTNING
from tools.trainers.frameworks.megatron import MEGATRON
from tools.trainers.frameworks.transformers import TRANSFORMERS
from tools.trainers.rows import Framework

FRAMEWORKS: dict[str, Framework] = {
    "deepspeed": DEEPSPEED,
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "transformers": TRANSFORMERS,
}
"""Frameworks by name."""
