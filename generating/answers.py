"""What checkpoints answer to prompts, printed in the form that was asked for.

The arguments here are those that generating.arguments.parse_args returns.
"""

from argparse import Namespace

from generating import terminal
from generating.load import Checkpoint
from generating.text import Completion, complete


def answer(
    checkpoints: list[Checkpoint], prompts: list[list[str]], args: Namespace
) -> list[list[Completion]]:
    """Continue each checkpoint's prompts, num_samples times each; print and return what it writes.

    prompts, and what is returned: a list for each checkpoint.
    """
    answers = []
    for checkpoint, own_prompts in zip(checkpoints, prompts, strict=True):
        note_long_prompts(checkpoint, own_prompts)
        growing = write(checkpoint, own_prompts, args)
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


def write(checkpoint: Checkpoint, prompts: list[str], args: Namespace):
    """What `complete` yields for num_samples of each prompt."""
    return complete(
        checkpoint.model,
        checkpoint.tokenizer,
        [prompt for prompt in prompts for _ in range(args.num_samples)],
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        seed=args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
    )


def note_long_prompts(checkpoint: Checkpoint, prompts: list[str]) -> None:
    """Say of which prompts the model does not see the beginning."""
    context = checkpoint.model.config.block_size
    for prompt in prompts:
        length = len(checkpoint.tokenizer.encode(prompt))
        if length > context:
            terminal.note(
                f"{checkpoint.name}: the prompt has {length:,} tokens; the model sees the last"
                f" {context} of them, its context"
            )
