# SPDX-License-Identifier: Apache-2.0
"""Plots what `nvte-ep bench ep --json` wrote, several files of one machine side by side.

    PYTHONPATH=python python tools/plot_ep.py OUT.png FILE.json...

benchmarks/h200/ep_1gpu.png and ep_2gpus.png are of the layer and the steps beside them. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nvte_ep.commands.bench_ep_output import plot

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    plot([json.loads(Path(name).read_text()) for name in sys.argv[2:]], Path(sys.argv[1]))
