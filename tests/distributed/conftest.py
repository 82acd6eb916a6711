# SPDX-License-Identifier: Apache-2.0
"""The modules of this folder are the package `distributed`, in the tests and in the processes of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
