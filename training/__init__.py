"""The parts of train.py: a run with its state, a step, and what saves and reports them."""


class RunError(Exception):
    """A run that cannot continue, in a sentence for the user; the exit status is 1."""
