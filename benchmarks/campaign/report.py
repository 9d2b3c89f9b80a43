"""Tables and pictures from recorded training steps: how far the estimate and the trace are off.

    python benchmarks/campaign/report.py benchmarks/results/h200 [MORE FOLDERS] [--out FOLDER]

Reads what benchmarks/campaign/campaign.py wrote, and what another recorder wrote, as it is: steps.jsonl with
the phases of two steps (campaign_parts/foreign_rows.py), events.jsonl.gz (histories.py), ops.jsonl
with single operations, from which a calibration is fitted (foreign_ops.py). Predictions that a
folder lacks are made here. Writes report.md, accuracy.png and histories.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("estimator", "profiler", "kernels", "benchmarks/campaign", "benchmarks/kernels")
sys.path[:0] = [str(ROOT / name) for name in ROOMS]

from campaign_parts.accuracy import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
