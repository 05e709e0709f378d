"""A tool as a command: what a user can mend ends it with a sentence on stderr and a status.

2: what was asked for cannot be had. 1: it went wrong on the way. 130: Ctrl-C. Imports no PyTorch:
a report is drawn beside the run, again and again.
"""

import argparse
import math
import sys
from collections.abc import Callable

import startup
from formats import files
from formats.address import AddressError
from formats.data_folder import DataError


def run(
    name: str,
    main: Callable[[list[str]], None],
    mistakes: tuple = (),
    failures: tuple = (),
    stopped: str = "",
) -> None:
    """Call main with the words of the command line; the process ends where it raises one of these.

    name: of the tool, which begins each sentence. mistakes, failures: errors beside those that all
    tools share, for the statuses 2 and 1. stopped: what Ctrl-C is answered with.
    """

    def leave(status, sentence):
        print(f"{name}: {sentence}", file=sys.stderr)
        sys.exit(status)

    try:
        startup.end()
        main(sys.argv[1:])
    except (AddressError, DataError, *mistakes) as error:
        leave(2, error)
    except failures as error:
        leave(1, error)
    except ModuleNotFoundError as error:
        leave(1, f"{error.name} is missing; pip install {error.name} -c constraints.txt")
    except OSError as error:
        leave(1, files.in_words(error))
    except KeyboardInterrupt:
        if stopped:
            print(f"\n{stopped}", file=sys.stderr)
        sys.exit(130)


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it must be a number above 0")
    return value
