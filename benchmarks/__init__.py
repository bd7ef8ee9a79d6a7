"""Tools beside the library, not installed with it: the demo's models, benchmarks, recordings. Run from the root of the repository."""

import sys
from pathlib import Path

# Random blocks come from the tests' model factory, whose modules name each other as the tests do.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
