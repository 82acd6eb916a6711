# SPDX-License-Identifier: Apache-2.0
"""python -m nvte_ep: the command line."""

from __future__ import annotations

import sys

from nvte_ep.commands import main

if __name__ == "__main__":
    sys.exit(main())
