"""Text from trained models.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN ...]

Knows only checkpoint folders: shape and tokenizer are read from there. `load_model` and `complete`
are for other programs too.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import torch

import hardware
from formats import files, run_folder
from formats.conversation import STOP
from formats.run_folder import CheckpointError
from generating.chat import conversation
from generating.cpu_kernels import pack
from generating.load import load_model
from generating.text import Completion, complete
from hardware import DeviceError, out_of_memory
from tokenizer_bpe import TokenizerError


def open_checkpoint(path: str | None, device: torch.device, dtype: torch.dtype):
    """(name, model, tokenizer) of a run or step, ready to generate; what it is goes to standard
    error.
    """
    folder = run_folder.find(path)
    model, tokenizer, state = load_model(folder, device, dtype)
    best = files.read_json(folder.parent / "best.json", step=int, val_loss=float) or {}
    loss = f", validation loss {best['val_loss']:.4f}" if best.get("step") == state["step"] else ""
    print(
        f"[{folder}: {model.num_parameters():,} parameters, {state['tokens']:,} tokens seen{loss}]",
        file=sys.stderr,
    )
    pack(model)
    return folder.as_posix(), model, tokenizer


def show(answers, chat: bool) -> list[Completion]:
    """Print continuations as they grow, each after its prompt (in a chat without), one below the
    other; returns them.
    """
    at, shown = 0, 0
    for rows in answers:
        while True:
            text = rows[at].text.lstrip() if chat else rows[at].prompt + rows[at].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if not rows[at].ended or at + 1 == len(rows):
                break
            print("\n---")
            at, shown = at + 1, 0
    print()
    return rows


def side_by_side(titles: list[str], texts: list[str]) -> str:
    """Texts as columns, as wide as the terminal."""
    width = max(20, shutil.get_terminal_size((160, 24)).columns // len(texts) - 3)
    columns = [[*textwrap.wrap(title, width), "-" * width] for title in titles]
    height = max(map(len, columns))
    columns = [[*[""] * (height - len(column)), *column] for column in columns]
    for column, text in zip(columns, texts, strict=True):
        for line in text.expandtabs(4).splitlines():
            column += textwrap.wrap(
                line, width, replace_whitespace=False, drop_whitespace=False
            ) or [""]
    height = max(map(len, columns))
    rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
    return "\n".join(" | ".join(line.ljust(width) for line in row).rstrip() for row in rows)


def answer(models: list, prompts: list[list[str]], args) -> list[list[Completion]]:
    """Continue prompts[m] with models[m], num_samples times each; print what they write in the form
    that was asked for, and return it.
    """
    settings = {
        key: getattr(args, key)
        for key in (
            "max_new_tokens",
            "stop",
            "seed",
            "temperature",
            "top_k",
            "top_p",
            "repetition_penalty",
        )
    }
    done = []
    for (name, model, tokenizer), texts in zip(models, prompts, strict=True):
        for text in texts:
            if (length := len(tokenizer.encode(text))) > model.config.block_size:
                print(
                    f"[{name}: the prompt has {length:,} tokens; the model sees the last"
                    f" {model.config.block_size} of them, its context]",
                    file=sys.stderr,
                )
        answers = complete(
            model, tokenizer, [text for text in texts for _ in range(args.num_samples)], **settings
        )
        if len(models) == 1 and not args.json:
            rows = show(answers, args.chat)
        else:
            *_, rows = answers
        speed = sum(len(row.ids) for row in rows) / max(row.seconds for row in rows)
        if args.json:
            for row in rows:
                shown = {
                    "checkpoint": name,
                    "prompt": row.prompt,
                    "text": row.text,
                    "ended": row.ended,
                    "tokens": len(row.ids),
                    "ids": row.ids,
                }
                print(
                    json.dumps(
                        shown
                        | {
                            "first_token_s": round(row.first_s, 4),
                            "tokens_per_second": round(speed, 1),
                        },
                        ensure_ascii=False,
                    ),
                    flush=True,
                )
        else:
            print(
                f"[{name}: {sum(len(row.ids) for row in rows):,} tokens, {speed:,.1f} tokens/s]",
                file=sys.stderr,
            )
        done.append(rows)
    if len(models) > 1 and not args.json:
        titles = [name for name, _, _ in models]
        print(
            "\n\n".join(
                side_by_side(
                    titles,
                    [row.text.strip() if args.chat else row.prompt + row.text for row in rows],
                )
                for rows in zip(*done, strict=True)
            )
        )
    return done


def session(models: list, args) -> None:
    """Prompts from the terminal until Ctrl-D; in a chat each model remembers the conversation.
    Ctrl-C ends a text, not the session.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    print(
        "a line is a prompt"
        + ("; /new forgets the conversation" if args.chat else "")
        + "; Ctrl-C stops a text, Ctrl-D leaves",
        file=sys.stderr,
    )
    histories = [[] for _ in models]
    while True:
        try:
            line = input("> ")
            if line == "/new":
                histories = [[] for _ in models]
            elif line.strip():
                asked = [[*history, {"role": "user", "content": line}] for history in histories]
                prompts = [
                    [conversation(messages, model, tokenizer)] if args.chat else [line]
                    for messages, (_, model, tokenizer) in zip(asked, models, strict=True)
                ]
                done = answer(models, prompts, args)
                histories = [
                    [*messages, {"role": "assistant", "content": rows[0].text}]
                    for messages, rows in zip(asked, done, strict=True)
                ]
        except EOFError:
            return print()
        except TokenizerError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()


def read_prompt(path: str) -> str:
    """The text of a file, or of standard input for -, without the line break at its end."""
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return re.sub(r"\r?\n\Z", "", text.decode("utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None


def parse_args(argv):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description=(
            "Text from trained models. Without a prompt on a terminal it asks for prompts; else it"
            " reads standard input."
        ),
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        action="append",
        metavar="PATH",
        help=(
            "a run (its best step by validation loss, else its newest) or one step of it; default:"
            " the newest run under checkpoints/. Several answer side by side"
        ),
    )
    add(
        "--prompt",
        action="append",
        dest="prompts",
        metavar="TEXT",
        help="the text to continue; several are one batch",
    )
    add(
        "--prompt_file",
        action="append",
        dest="prompts",
        type=read_prompt,
        metavar="PATH",
        help="the text to continue, from a file; - is standard input",
    )
    add(
        "--chat",
        action="store_true",
        help=(
            "a prompt is what a user says in a conversation, and the model replies; for models"
            " trained on `messages`"
        ),
    )
    add(
        "--max_new_tokens",
        type=int,
        default=200,
        metavar="N",
        help="default %(default)s; end-of-text stops earlier",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token each time; default %(default)s",
    )
    add(
        "--top_k",
        type=int,
        default=200,
        metavar="K",
        help="draw among the K likeliest tokens, 0 for all; default %(default)s",
    )
    add(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help=(
            "draw among the likeliest tokens that together reach probability P; default %(default)s"
        ),
    )
    add(
        "--repetition_penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, tokens that were there before become less likely; default %(default)s",
    )
    add(
        "--num_samples",
        type=int,
        default=1,
        metavar="N",
        help="continuations of each prompt; default %(default)s",
    )
    add(
        "--seed",
        type=int,
        metavar="S",
        help="same seed, same text; default: another text each time",
    )
    add(
        "--json",
        action="store_true",
        help="a line of JSON for each continuation: text, token ids, tokens/s",
    )
    add("--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="of the weights; auto: bfloat16 where the hardware multiplies it; default %(default)s",
    )
    args = parser.parse_args(argv)
    for name, ok, allowed in (
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < float("inf"), "0 or more"),
        ("top_k", args.top_k >= 0, "0 or more"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
        ("repetition_penalty", 0 < args.repetition_penalty < float("inf"), "above 0"),
        ("num_samples", args.num_samples >= 1, "at least 1"),
        ("seed", args.seed is None or 0 <= args.seed < 2**63, "0 or more, and below 2**63"),
        ("stop", all(args.stop), "a text, not empty"),
    ):
        if not ok:
            parser.error(f"--{name} {getattr(args, name)}: it must be {allowed}")
    if args.chat:
        args.stop.append(STOP)
    return args


def main(argv):
    """The command line's work."""
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    device = hardware.find_device(args.device)
    dtype = hardware.find_dtype(device, args.dtype)
    models = [open_checkpoint(path, device, dtype) for path in args.checkpoint or [None]]
    if args.prompts is None and sys.stdin.isatty():
        return session(models, args)
    prompts = args.prompts or [read_prompt("-")]
    if args.chat:
        answer(
            models,
            [
                [conversation([{"role": "user", "content": text}], *pair[1:]) for text in prompts]
                for pair in models
            ],
            args,
        )
    else:
        if not all(prompts):
            print("[an empty prompt: the model begins a document]", file=sys.stderr)
        answer(models, [prompts] * len(models), args)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CheckpointError, TokenizerError, DeviceError, argparse.ArgumentTypeError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as with `| head`; nothing is left to write to when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print(
            "generate.py: out of memory; fewer --num_samples, or --device cpu, take less",
            file=sys.stderr,
        )
        sys.exit(1)
