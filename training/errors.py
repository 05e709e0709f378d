"""What ends a run with a sentence for the user."""


class RunError(RuntimeError):
    """A run that cannot go on; the exit status is 1."""
