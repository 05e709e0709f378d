"""The parts of train.py: the state of a run, a training step, saves and reports."""

import sys

from command_line import UserError


class RunError(UserError):
    """A run that cannot continue."""

    status = 1


def warn(message: str) -> None:
    """Print a warning to stderr, below a progress bar."""
    print(f"\n{message}", file=sys.stderr)
