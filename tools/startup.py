"""Lets `python tools/NAME.py` start a tool, from any folder.

Python then looks in tools/ first, and takes this for the module startup. It puts the folder above
in place of tools/, and the real startup in place of this.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)
del sys.modules["startup"]
import startup  # noqa: E402, F401 - the import of this module returns what sys.modules now has
