"""The parts of train.py: a run with its state, a step, and what saves and reports them."""

import sys


class RunError(Exception):
    """A run that cannot continue, in a sentence for the user; the exit status is 1."""


def warn(message: str) -> None:
    """Print to stderr, below a progress bar."""
    print(f"\n{message}", file=sys.stderr)
