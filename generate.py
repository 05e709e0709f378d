"""Text from trained models.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN ...]

Knows only checkpoint folders: shape and tokenizer are read from there. A prompt becomes text in
generating/text.py (complete), token by token in decode.py (generate), each drawn in sampling.py.
For other programs, generating.load.load_model and generating.text.complete do the same.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import contextlib
import os
import sys
from argparse import Namespace

import hardware
from formats.run_folder import CheckpointError
from generating import chat, terminal
from generating.arguments import parse_args, read_prompt
from generating.load import Checkpoint, open_checkpoint
from generating.text import Completion, complete
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
        if args.chat and not chat.saw_conversations(checkpoint.state):
            terminal.note(
                f"{checkpoint.name} was not trained on conversations: to --chat it may reply"
                " anything"
            )

    if args.prompts is None and sys.stdin.isatty():
        session(checkpoints, args)
        return
    prompts = args.prompts or [read_prompt("-")]
    if not all(prompts) and not args.chat:
        terminal.note("an empty prompt: the model begins a document")
    prompts_of_each = [prompts] * len(checkpoints)
    if args.chat:
        prompts_of_each = [chat.first_prompts(prompts, c, args.system) for c in checkpoints]
    answer(checkpoints, prompts_of_each, args)


def answer(
    checkpoints: list[Checkpoint], prompts: list[list[str]], args: Namespace
) -> list[list[Completion]]:
    """Continue each checkpoint's prompts, num_samples times each; print and return what it writes.

    prompts, and what is returned: a list for each checkpoint.
    """
    answers = []
    for checkpoint, own_prompts in zip(checkpoints, prompts, strict=True):
        terminal.note_long_prompts(checkpoint, own_prompts)
        growing = complete(
            checkpoint.model,
            checkpoint.tokenizer,
            [prompt for prompt in own_prompts for _ in range(args.num_samples)],
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            seed=args.seed,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            repetition_penalty=args.repetition_penalty,
        )
        if len(checkpoints) == 1 and not args.json:
            completions = terminal.show(growing, args.chat)
        else:
            *_, completions = growing
        if args.json:
            terminal.show_json(checkpoint.name, completions)
        else:
            terminal.note_speed(checkpoint.name, completions)
        answers.append(completions)
    if len(checkpoints) > 1 and not args.json:
        terminal.show_beside([checkpoint.name for checkpoint in checkpoints], answers, args.chat)
    return answers


def session(checkpoints: list[Checkpoint], args: Namespace) -> None:
    """Ask for prompts until Ctrl-D; in a chat each model remembers the conversation.

    Ctrl-C ends a text, not the session.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    forget = "; /new forgets the conversation" if args.chat else ""
    print(f"a line is a prompt{forget}; Ctrl-C stops a text, Ctrl-D leaves", file=sys.stderr)
    conversations = [chat.Conversation(c, args.system) for c in checkpoints]
    while True:
        line = ""
        try:
            line = input("> ")
            if line == "/new":
                conversations = [chat.Conversation(c, args.system) for c in checkpoints]
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
        except TokenizerError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()
            if args.chat and line.strip():
                terminal.note("the conversation goes on without this")


if __name__ == "__main__":
    try:
        startup.end()
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
