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
from formats.run_folder import CheckpointError, saw_conversations
from generating import terminal
from generating.arguments import parse_args, read_prompt
from generating.chat import Conversation
from generating.load import LoadedModel, open_checkpoint
from generating.text import Completion, complete
from tokenizer_bpe import TokenizerError

# The arguments that generating.text.complete takes too.
SETTINGS = ("max_new_tokens", "stop", "seed", "temperature", "top_k", "top_p", "repetition_penalty")
# Errors that a user can mend; the exit status is 2.
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
    models = []
    for path in args.checkpoint or [None]:
        loaded = open_checkpoint(path, device, args.dtype)
        terminal.note(loaded.summary)
        if args.chat and not saw_conversations(loaded.state):
            terminal.note(
                f"{loaded.name} was not trained on conversations; config/chat.py does that"
            )
        models.append(loaded)
    if args.prompts is None and (args.chat or sys.stdin.isatty()):
        session(models, args)  # of a chat each line is a message, from a pipe too
        return
    lines = args.prompts or [read_prompt("-")]
    if not all(lines) and not args.chat:
        terminal.note("an empty prompt: the model begins a document")
    prompts = [lines] * len(models)
    if args.chat:
        prompts = [[Conversation(m, args.system).prompt(line) for line in lines] for m in models]
    answer(models, prompts, args)


def answer(
    models: list[LoadedModel], prompts: list[list[str]], args: Namespace
) -> list[list[Completion]]:
    """Continue each model's prompts, num_samples times each; print and return the texts.

    prompts, and what is returned: a list for each model.
    """
    in_columns = len(models) > 1 and not args.json
    settings = {name: getattr(args, name) for name in SETTINGS}
    answers = []
    for loaded, own_prompts in zip(models, prompts, strict=True):
        terminal.note_long_prompts(loaded, own_prompts)
        repeated = [prompt for prompt in own_prompts for _ in range(args.num_samples)]
        decoder = loaded.decoder(len(repeated))
        growing = complete(loaded.model, loaded.tokenizer, repeated, decoder=decoder, **settings)
        if in_columns or args.json:
            *_, completions = growing
        else:
            completions = terminal.stream(growing, args.chat)
        if args.json:
            terminal.show_json(loaded.name, completions)
        else:
            terminal.note_speed(loaded.name, completions)
        answers.append(completions)
    if in_columns:
        names = [loaded.name for loaded in models]
        for completions in zip(*answers, strict=True):
            texts = [terminal.shown(completion, args.chat) for completion in completions]
            print(terminal.columns(names, texts), end="\n\n")
    return answers


def session(models: list[LoadedModel], args: Namespace) -> None:
    """Ask for prompts until Ctrl-D; in a chat each model remembers its conversation.

    Ctrl-C ends a text, not the session.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    if args.chat:
        print("Enter a message; /new starts a new conversation", file=sys.stderr)
        print("Ctrl-C stops the reply or clears the line, Ctrl-D exits", file=sys.stderr)
    else:
        print("Enter a prompt; Ctrl-C stops the text, Ctrl-D exits", file=sys.stderr)
    conversations = [Conversation(loaded, args.system) for loaded in models]
    while True:
        try:
            line = input("> ")
            if line == "/new":
                conversations = [Conversation(loaded, args.system) for loaded in models]
            elif line.strip() and args.chat:
                prompts = [[conversation.prompt(line)] for conversation in conversations]
                answers = answer(models, prompts, args)
                for conversation, (reply, *_) in zip(conversations, answers, strict=True):
                    conversation.remember(line, reply.text)
            elif line.strip():
                answer(models, [[line]] * len(models), args)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except TokenizerError as error:
            print(error, file=sys.stderr)


def explain(error: BaseException) -> str | None:
    """The sentence for a failure that is no mistake, if it has one."""
    if isinstance(error, OSError):
        return files.error_message(error)
    if hardware.out_of_memory(error):
        return "out of memory; try fewer --num_samples, or --device cpu"
    return None


if __name__ == "__main__":
    startup.end()
    sys.exit(startup.run("generate.py", main, MISTAKES, explain))
