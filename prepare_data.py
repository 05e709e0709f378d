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
import os
import signal
import sys
import time
from argparse import Namespace

from formats.files import error_message
from preparing import InputError, engines
from preparing.arguments import parse
from preparing.documents import UNUSABLE
from preparing.encoder import encode_chunks
from preparing.summary import Progress, describe, summary, verify
from preparing.tokenizers import obtain_tokenizer
from preparing.work_folder import WorkFolder
from preparing.writer import TokenWriter
from tokenizer_bpe import Tokenizer


def prepare(plan: Namespace) -> None:
    """The command's work: from the input to a finished folder, or on from where it stopped."""
    started = time.monotonic()
    os.environ.setdefault("RAYON_NUM_THREADS", str(plan.workers))  # those of the Rust packages
    work = WorkFolder(plan)  # finds the input
    if plan.ray:
        engines.connect(plan.ray)
    with work:
        if finished := work.finished():
            print(finished)
            return
        work.start_or_resume()
        tokenizer, origin = obtain_tokenizer(work)
        writer = tokenize(work, tokenizer)
        meta = describe(work, writer)
        work.publish(meta, writer.report)
    print(summary(meta, writer, origin=origin, seconds=time.monotonic() - started))


def tokenize(work: WorkFolder, tokenizer: Tokenizer) -> TokenWriter:
    """Tokenize what is asked for and not finished yet into the working folder; says how far.

    Chunks of text are read and written here, in order, and encoded in threads. Raises InputError
    when nothing is left of the text.
    """
    writer = TokenWriter(work, tokenizer)
    if writer.position.on_disk:
        megabytes = writer.position.on_disk / 1e6
        print(f"continuing after {megabytes:,.1f} MB of the input", file=sys.stderr)
    if not writer.split_by and not writer.is_full:
        encode = functools.partial(encode_chunks, tokenizer, work.plan.options)
        total = work.most_bytes if math.isfinite(work.most_bytes) else work.input_size
        bar = Progress(total, "tokenizing", writer.done)
        with work.map_text(encode, writer.position) as parts, bar:
            for part in parts:
                writer.add(part)
                bar.to(writer.done)
                if writer.is_full:
                    break
    if not writer.text_bytes:
        rules = writer.report.rules
        why = "; ".join(f"{rule}: {counts['documents']:,}" for rule, counts in rules.items())
        if UNUSABLE in rules:
            why += f"; the first is {rules[UNUSABLE]['examples'][0]}"
        raise InputError(
            f"no document is left of the input, which begins with {work.sources[0].name}"
            f" ({why or 'only white space'})"
        )
    return writer


def main(argv: list[str]) -> None:
    """Prepare what the command line asks for, or verify a folder."""
    signal.signal(signal.SIGTERM, terminate)
    plan = parse(argv)
    if plan.verify:
        print(verify(plan.verify))
    else:
        prepare(plan)


def terminate(signum, _):
    """Stop as Ctrl-C does, with the exit status of the signal."""
    raise KeyboardInterrupt(signum)


def explain(error: BaseException) -> str | None:
    """The sentence for another error, if it has one."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped; finished work is kept, and the same command continues"
    if isinstance(error, OSError):
        return (
            f"{error_message(error)}; finished work is kept, and the same command continues once"
            " there is room or permission"
        )
    return None


if __name__ == "__main__":
    startup.end()
    status = startup.run("prepare_data.py", main, explain)
    if status > 128:
        # Stopped, maybe with threads at work in packages. Python's own exit would wait for those at
        # a chunk, and abort, or hang, in the one that trains a tokenizer.
        os._exit(status)
    sys.exit(status)
