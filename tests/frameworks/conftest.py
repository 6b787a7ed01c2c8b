"""Makes `tools` importable, because Megatron's tests and the matrix of versions share a model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last, so that an installed equivcheck is still the one under test
