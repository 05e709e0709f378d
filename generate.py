"""Text from trained models.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN ...]

Knows only checkpoint folders: shape and tokenizer are read from there. A prompt becomes text in
generating/text.py (complete), token by token in decode.py (generate). Other programs do the same
with generating.load.load_model and generating.text.complete.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import contextlib
import sys
from argparse import Namespace

import hardware
from formats import files
from formats.address import AddressError
from formats.run_folder import CheckpointError
from generating import terminal
from generating.arguments import parse_args, read_prompt
from generating.chat import Conversation, saw_conversations
from generating.load import Checkpoint, open_checkpoint
from generating.text import Completion, complete
from tokenizer_bpe import TokenizerError

# The arguments that generating.text.complete takes too.
SETTINGS = ("max_new_tokens", "stop", "seed", "temperature", "top_k", "top_p", "repetition_penalty")

MISTAKES = (
    AddressError,
    CheckpointError,
    TokenizerError,
    hardware.DeviceError,
    argparse.ArgumentTypeError,
)


def main(argv: list[str]) -> None:
    """Open the checkpoints, and let them continue the prompts."""
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    device = hardware.find_device(args.device)
    checkpoints = []
    for path in args.checkpoint or [None]:
        checkpoint = open_checkpoint(path, device, args.dtype)
        terminal.note(checkpoint.summary)
        if args.chat and not saw_conversations(checkpoint.state):
            terminal.note(
                f"{checkpoint.name} was not trained on conversations; config/chat.py does that"
            )
        checkpoints.append(checkpoint)
    if args.prompts is None and sys.stdin.isatty():
        session(checkpoints, args)
        return
    lines = args.prompts or [read_prompt("-")]
    if not all(lines) and not args.chat:
        terminal.note("an empty prompt: the model begins a document")
    prompts = [lines] * len(checkpoints)
    if args.chat:
        prompts = [[Conversation(c, args.system).prompt(s) for s in lines] for c in checkpoints]
    answer(checkpoints, prompts, args)


def answer(
    checkpoints: list[Checkpoint], prompts: list[list[str]], args: Namespace
) -> list[list[Completion]]:
    """Continue each checkpoint's prompts, num_samples times each; print and return the texts.

    prompts, and what is returned: a list for each checkpoint.
    """
    answers = []
    for checkpoint, own_prompts in zip(checkpoints, prompts, strict=True):
        terminal.note_long_prompts(checkpoint, own_prompts)
        repeated = [prompt for prompt in own_prompts for _ in range(args.num_samples)]
        settings = {name: getattr(args, name) for name in SETTINGS}
        growing = complete(checkpoint.model, checkpoint.tokenizer, repeated, **settings)
        if len(checkpoints) == 1 and not args.json:
            completions = terminal.stream(growing, args.chat)
        else:
            *_, completions = growing
        if args.json:
            terminal.show_json(checkpoint.name, completions)
        else:
            terminal.note_speed(checkpoint.name, completions)
        answers.append(completions)
    if len(checkpoints) > 1 and not args.json:
        terminal.show_columns([checkpoint.name for checkpoint in checkpoints], answers, args.chat)
    return answers


def session(checkpoints: list[Checkpoint], args: Namespace) -> None:
    """Ask for prompts until Ctrl-D; in a chat each model remembers its conversation.

    Ctrl-C ends a text, not the session.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    if args.chat:
        print("a line is a message; /new starts a new conversation", file=sys.stderr)
        print("Ctrl-C stops a reply or takes the line back, Ctrl-D leaves", file=sys.stderr)
    else:
        print("a line is a prompt; Ctrl-C stops a text, Ctrl-D leaves", file=sys.stderr)
    conversations = [Conversation(c, args.system) for c in checkpoints]
    while True:
        try:
            line = input("> ")
            if line == "/new":
                conversations = [Conversation(c, args.system) for c in checkpoints]
            elif line.strip() and args.chat:
                prompts = [[conversation.prompt(line)] for conversation in conversations]
                answers = answer(checkpoints, prompts, args)
                for conversation, (reply, *_) in zip(conversations, answers, strict=True):
                    conversation.remember(line, reply.text)
            elif line.strip():
                answer(checkpoints, [[line]] * len(checkpoints), args)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except TokenizerError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    try:
        startup.end()
        main(sys.argv[1:])
        sys.stdout.flush()
    except MISTAKES as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as with `| head`
        sys.exit(0)
    except OSError as error:
        sys.exit(f"generate.py: {files.in_words(error)}")
    except (RuntimeError, MemoryError) as error:
        if not hardware.out_of_memory(error):
            raise
        sys.exit("generate.py: out of memory; try fewer --num_samples, or --device cpu")
