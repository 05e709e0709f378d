"""Text from trained models.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN ...]

Knows only checkpoint folders: shape and tokenizer are read from there. For other programs,
generating.load.load_model and generating.text.complete do the same.
"""

import argparse
import os
import sys

import hardware
from formats.run_folder import CheckpointError
from generating import chat, terminal
from generating.answers import answer
from generating.arguments import parse_args, read_prompt
from generating.load import open_checkpoint
from tokenizer_bpe import TokenizerError


def main(argv: list[str]) -> None:
    """Open the checkpoints, and let them answer the prompts."""
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another

    device = hardware.find_device(args.device)
    checkpoints = []
    for path in args.checkpoint or [None]:
        checkpoint = open_checkpoint(path, device, args.dtype)
        terminal.note(checkpoint.summary)
        checkpoints.append(checkpoint)

    if args.prompts is None and sys.stdin.isatty():
        chat.session(checkpoints, args)
        return
    prompts = args.prompts or [read_prompt("-")]
    if args.chat:
        answer(checkpoints, chat.first_turns(checkpoints, prompts), args)
        return
    if not all(prompts):
        terminal.note("an empty prompt: the model begins a document")
    answer(checkpoints, [prompts] * len(checkpoints), args)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (
        CheckpointError,
        TokenizerError,
        hardware.DeviceError,
        argparse.ArgumentTypeError,
    ) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as with `| head`; nothing is left to write to when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, MemoryError) as error:
        if not hardware.out_of_memory(error):
            raise
        print(
            "generate.py: out of memory; fewer --num_samples, or --device cpu, take less",
            file=sys.stderr,
        )
        sys.exit(1)
