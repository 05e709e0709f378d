"""What can go wrong while preparing, each with a sentence for the user. Independent of all else."""


class InputError(ValueError):
    """Input that cannot be used. The command ends with status 2."""


class PrepareError(RuntimeError):
    """A failure while running; what was finished before is kept. The command ends with status 1."""
