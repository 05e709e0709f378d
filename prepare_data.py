"""Text files -> data/<name>/: token ids in train.bin and val.bin, the tokenizer, and meta.json.

    python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH]

This file is the order in which things happen; preparing/ holds the steps. The bytes written depend
on the input and the settings alone: not on the number of workers, and not on interruptions. Kill it
at any time and run the same command again. Independent of models.
"""

import startup

if __name__ == "__main__":
    startup.begin()  # before the slow imports

import functools
import math
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

from formats.data_folder import DataError, dtype_for
from preparing import InputError, PrepareError
from preparing.arguments import parse_args
from preparing.encoder import encode_chunk
from preparing.job import Plan, WorkFolder
from preparing.progress import Progress
from preparing.summary import compress, describe, summary, verify
from preparing.tokenizers import obtain_tokenizer
from preparing.writer import Journal, Output
from tokenizer_bpe import Tokenizer, TokenizerError

STOPPED = "stopped; finished work is kept, and the same command continues"


def prepare(args: Namespace) -> None:
    """The command's work: from the input to a finished folder, or on from where it stopped."""
    started = time.monotonic()
    plan = Plan(args)  # finds the input; writes nothing
    with WorkFolder(plan) as work:
        if finished := work.finished():
            print(finished)
            return
        work.start_or_resume()
        tokenizer, origin = obtain_tokenizer(plan, work)
        work.check_room(tokenizer.vocab_size)
        journal = tokenise(plan, work, tokenizer)
        meta, used = describe(plan, work, tokenizer, journal)
        work.publish(meta, journal.report)
    seconds = time.monotonic() - started
    print(summary(plan, meta, journal, tokenizer, origin=origin, used=used, seconds=seconds))


def tokenise(plan: Plan, work: WorkFolder, tokenizer: Tokenizer) -> Journal:
    """Tokenise what is asked for and not finished yet into the working folder; says how far.

    Chunks of text are read here, encoded by worker processes, and written here in order. Raises
    InputError when nothing is left of the text.
    """
    output = Output(plan, work, tokenizer)
    journal = output.journal
    is_limited = plan.most_bytes < math.inf
    if journal.position.on_disk:
        megabytes = journal.position.on_disk / 1e6
        print(f"continuing after {megabytes:,.1f} MB of the input", file=sys.stderr)
    if not journal.split and not output.is_full:
        encode = functools.partial(
            encode_chunk, tokenizer, dtype_for(tokenizer.vocab_size), plan.options
        )
        total = plan.most_bytes if is_limited else plan.input_size
        bar = Progress(total, "tokenising", output.done)
        with work.map_text(encode, journal.position) as parts, bar:
            output.start_clock()  # the workers are up
            for part in parts:
                output.add(part)
                bar.to(output.done)
                if output.is_full:
                    break
    if not any(journal.tokens.values()):
        rules = journal.report.rules.items()
        why = "; ".join(f"{rule}: {counts['documents']:,}" for rule, counts in rules)
        raise InputError(
            f"no document is left of the input, which begins with {plan.sources[0].path}"
            f" ({why or 'only white space'})"
        )
    if is_limited and not output.is_full:
        found = journal.text_bytes / 1e9
        print(f"the input has only {found:.3g} GB of text, and all of it is used", file=sys.stderr)
    output.finish()
    return journal


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops the work as Ctrl-C does."""


def terminate(*_):
    raise Terminated


def main(argv: list[str]) -> int:
    """The exit status.

    0, 1 for a failure while running, 2 for bad usage or input, 130 after Ctrl-C, 143 after SIGTERM.
    """
    signal.signal(signal.SIGTERM, terminate)
    sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    try:
        args = parse_args(argv)
        if args.verify:
            print(verify(Path(args.verify)))
        elif args.compress:
            print(compress(Path(args.compress), args.workers))
        else:
            prepare(args)
    except (InputError, PrepareError, TokenizerError, DataError) as error:
        failed = isinstance(error, PrepareError) or args.verify
        return complain(error, 1 if failed else 2)
    except OSError as error:
        place = error.filename or args.verify or args.compress or args.out
        reason = error.strerror or error
        return complain(
            f"{place}: {reason}; finished work is kept, and the same command continues once there"
            " is room or permission",
            1,
        )
    except KeyboardInterrupt as stop:
        return complain(STOPPED, 143 if isinstance(stop, Terminated) else 130)
    finally:
        startup.done()
    return 0


def complain(message: object, status: int) -> int:
    """Print an error in the command's name; returns the exit status to end with."""
    print(f"prepare_data.py: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    startup.end()
    sys.exit(main(sys.argv[1:]))
