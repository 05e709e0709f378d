"""Trying again what may pass: connections that break or stall, replies such as 429 and 503.

Which failures may pass is for remote.py to say.
"""

import math
import random
import sys
import time
from collections.abc import Callable

from preparing.errors import PrepareError
from preparing.remote import final, short

FIRST_PAUSE = 0.5  # seconds before the second try; each further pause is twice as long,
LONGEST_PAUSE = 60  # up to this
WHILE_LISTING = 20  # seconds of trying before a run begins,
PATIENCE = 30 * 60  # and without a byte while it goes on; it can be continued
REPORTS = 30  # seconds between two lines about trouble

reported = -math.inf  # when the last such line was written


def patiently(action: Callable, address: str, patience: float = PATIENCE) -> object:
    """What `action` returns, tried again for `patience` seconds while its failures may pass.

    Raises what remote.final() makes of those that will not, and PrepareError at the end.
    """
    started = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        try:
            return action()
        except Exception as error:
            ending = final(error, address)
            if ending:
                raise ending from error
            if time.monotonic() - started + pause > patience:
                raise PrepareError(
                    f"{address} cannot be reached: {short(error)}. See whether there is a network;"
                    " what is finished is kept, and the same command continues"
                ) from None
            _report(address, error)
        time.sleep(pause * random.uniform(0.5, 1))  # so that the requests do not return together
        pause = min(2 * pause, LONGEST_PAUSE)


def _report(address, error):
    """Say on stderr, not too often, that there is trouble."""
    global reported
    now = time.monotonic()
    if now - reported > REPORTS:
        reported = now
        print(f"{address}: {short(error)}; trying again", file=sys.stderr, flush=True)
