"""The parts of train.py: the state of a run, a training step, saves and reports."""

import sys


class RunError(Exception):
    """A run that cannot continue; the message is for the user, the exit status is 1."""


def warn(message: str) -> None:
    """Print a warning to stderr, below a progress bar."""
    print(f"\n{message}", file=sys.stderr)
