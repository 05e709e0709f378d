"""Text from a trained model.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN]

Knows only the folder of a model: shape and tokenizer are read from there. A prompt becomes text in
generating/text.py (complete), token by token in decode.py (generate). Other programs do the same
with generating.load.open_checkpoint and generating.text.complete.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import contextlib
import os
import sys
from argparse import Namespace

import hardware
from formats import files
from generating import terminal
from generating.load import LoadedModel, open_checkpoint
from generating.terminal import parse_args
from generating.text import Completion, Conversation, complete
from tokenizer_bpe import TokenizerError

# The arguments that generating.text.complete takes too.
SETTINGS = ("max_new_tokens", "stop", "chat", "seed")
SETTINGS += ("temperature", "top_k", "top_p", "repetition_penalty")


def main(argv: list[str]) -> None:
    """Open the checkpoint, and let it continue the prompts."""
    args = parse_args(argv)
    loaded = open_checkpoint(args.checkpoint, hardware.find_device(args.device), args.dtype)
    system = loaded.source.system
    terminal.note(loaded.summary)
    if args.chat and not loaded.source.chats:
        terminal.note(
            "this model was not trained on conversations in this format (docs/data.md), so its"
            " replies will make little sense; see config/chat.py"
        )
    if args.chat and args.system is None and system:
        args.system = system
        terminal.note(f"system message of the model: {system}; --system gives another")
    if args.prompts is None and (args.chat or sys.stdin.isatty()):
        session(loaded, args)  # of a chat each line is a message, from a pipe too
        return
    prompts = args.prompts or [terminal.read_prompt()]
    if args.chat:
        conversation = Conversation(loaded.model, loaded.tokenizer, args.system)
        prompts = [conversation.prompt(line) for line in prompts]
    elif not all(prompts):
        terminal.note("an empty prompt: the model begins a document")
    answer(loaded, prompts, args)


def answer(
    loaded: LoadedModel, prompts: list[str | list[int]], args: Namespace
) -> list[Completion]:
    """Continue the prompts, num_samples times each; print and return the texts."""
    terminal.note_prompts(loaded, prompts)
    repeated = [prompt for prompt in prompts for _ in range(args.num_samples)]
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["end_ids"] = loaded.source.end_ids
    growing = complete(loaded.model, loaded.tokenizer, repeated, **settings)
    if args.json:
        *_, completions = growing
        terminal.show_json(loaded.source.path.as_posix(), completions)
    else:
        completions = terminal.stream(growing, args.chat)
        terminal.note_speed(completions)
    terminal.note_endings(completions, args.chat)
    return completions


def session(loaded: LoadedModel, args: Namespace) -> None:
    """Ask for prompts until the input ends; a chat remembers the conversation.

    Ctrl-C ends a text, not the session.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    end = "Ctrl-Z and Enter exit" if os.name == "nt" else "Ctrl-D exits"
    what = "message; /new starts a new conversation" if args.chat else "prompt"
    print(f"Enter a {what}\nCtrl-C stops a text or clears the line, {end}", file=sys.stderr)
    conversation = Conversation(loaded.model, loaded.tokenizer, args.system)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            if line == "/new" and args.chat:
                conversation.messages.clear()
            elif line.strip() and args.chat:
                prompt = conversation.prompt(line)
                terminal.note_dropped(conversation)
                reply, *_ = answer(loaded, [prompt], args)
                conversation.remember(line, reply.text)
            elif line.strip():
                answer(loaded, [line], args)
        except EOFError:
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            raise terminal.not_text(error) from None
        except KeyboardInterrupt:
            print()
        except TokenizerError as error:
            print(error, file=sys.stderr)


def explain(error: BaseException) -> str | None:
    """The sentence for another error, if it has one."""
    if isinstance(error, OSError):
        return files.error_message(error)
    if hardware.out_of_memory(error):
        return "out of memory; try fewer --num_samples, or --device cpu"
    return None


if __name__ == "__main__":
    startup.end()
    sys.exit(startup.run("generate.py", main, explain))
