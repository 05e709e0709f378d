"""What train.py is made of: a run and its state, the parts of a step, and what keeps both going."""


class RunError(RuntimeError):
    """A run that cannot continue, in a sentence for the user; the exit status is 1."""
