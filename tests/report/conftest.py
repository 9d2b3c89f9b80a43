"""`priced` is imported by name: `report` is also a program of benchmarks/, and the
importlib import mode adds no path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
