"""Tables and pictures from recorded training steps: how far the estimate and the trace are off.

    python benchmarks/report.py benchmarks/results/h200 [MORE FOLDERS] [--out FOLDER]

Reads what benchmarks/campaign.py wrote, and steps.jsonl files with one row a case, the phases of two steps and whole-step seconds
(see campaign_parts/foreign_rows.py). Predictions that a folder lacks are made here. Writes report.md and accuracy.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("estimator", "profiler", "kernels", "benchmarks")]

from campaign_parts.accuracy import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
