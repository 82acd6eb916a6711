# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder import the scripts beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
