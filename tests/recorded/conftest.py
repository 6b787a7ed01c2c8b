"""Makes `tools` importable: it is in the checkout, but not in the installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last, so that an installed equivcheck is still the one under test
