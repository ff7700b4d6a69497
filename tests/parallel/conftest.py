"""Samples of the policies are made by the modules that the policies' own tests use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))
