"""What `python tools/NAME.py` imports as startup, since Python then looks in tools/ first."""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"start it from the folder above tools/, as: python -m tools.{name}", file=sys.stderr)
sys.exit(2)
