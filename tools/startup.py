"""Stops `python tools/NAME.py`, which imports this as startup, as Python looks in tools/ first."""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"start it from the folder above tools/, as: python -m tools.{name}", file=sys.stderr)
sys.exit(2)
