"""The committed vectors are what the generator makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_vectors_are_up_to_date() -> None:
    generator = Path(__file__).with_name("make_golden.py")
    made = subprocess.run(
        [sys.executable, str(generator), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
