"""Text from a trained model.

    python generate.py --prompt "Once upon a time" [--checkpoint checkpoints/RUN]

Knows only the checkpoint folder: shape and tokenizer are read from there.
"""
import argparse
import sys
from pathlib import Path

import torch

import checkpoint
import hardware
import sampling
from checkpoint import CheckpointError
from guard import out_of_memory
from hardware import DeviceError
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer, TokenizerError


def load_model(folder: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """Model (evaluation mode, float32), tokenizer and state of a step folder. Raises CheckpointError for one that is not whole."""
    state = checkpoint.read_state(folder, ("model.pt", "tokenizer.json"))
    try:
        model = GPT(GPTConfig(**state["model"]))
        model.load_state_dict(checkpoint.load_tensors(folder / "model.pt"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None
    return model.to(device).eval(), Tokenizer.load(folder / "tokenizer.json"), state


def complete(model: GPT, tokenizer: Tokenizer, prompt: str, samples: int, max_new_tokens: int, seed: int | None, **settings) -> list[str]:
    """`samples` continuations of one prompt, each ended by end-of-text or max_new_tokens. settings: as in sampling.generate."""
    device = model.wte.weight.device
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.eot_id]  # without a prompt, the start of a document
    generator = torch.Generator(device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    written, done = [[] for _ in range(samples)], [False] * samples
    for next_ids in sampling.generate(model, [ids] * samples, max_new_tokens, vocab_size=tokenizer.vocab_size, generator=generator, **settings):
        for i, next_id in enumerate(next_ids):
            done[i] = done[i] or next_id == tokenizer.eot_id
            if not done[i]:
                written[i].append(next_id)
        if all(done):
            break
    return [tokenizer.decode(ids) for ids in written]


def parse_args(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="generate.py", description="Text from a trained model.")
    parser.add_argument("--checkpoint", metavar="PATH", help="a run (its best step by validation loss, else its newest) or one step of it; default: the newest run under checkpoints/")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the text to continue; default: the start of a document")
    parser.add_argument("--max_new_tokens", type=int, default=200, metavar="N", help="default %(default)s; end-of-text stops earlier")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token each time; default %(default)s")
    parser.add_argument("--top_k", type=int, default=200, metavar="K", help="draw among the K likeliest tokens, 0 for all; default %(default)s")
    parser.add_argument("--top_p", type=float, default=1.0, metavar="P", help="draw among the likeliest tokens that together reach probability P; default %(default)s")
    parser.add_argument("--num_samples", type=int, default=1, metavar="N", help="continuations to write; default %(default)s")
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same text; default: another text each time")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s")
    args = parser.parse_args(argv)
    for name, ok, allowed in (
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < float("inf"), "0 or more"),
        ("top_k", args.top_k >= 0, "0 or more"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
        ("num_samples", args.num_samples >= 1, "at least 1"),
        ("seed", args.seed is None or 0 <= args.seed < 2**63, "0 or more, and below 2**63"),
    ):
        if not ok:
            parser.error(f"--{name} {getattr(args, name)}: it must be {allowed}")
    return args


def main(argv):
    """The command line's work."""
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    device = hardware.find_device(args.device)
    folder = checkpoint.find(args.checkpoint)
    model, tokenizer, state = load_model(folder, device)
    best = checkpoint.read_json(folder.parent / "best.json") or {}
    loss = f", validation loss {best['val_loss']:.4f}" if best.get("step") == state["step"] else ""
    print(f"[{folder}: {model.num_parameters():,} parameters, {state['tokens']:,} tokens seen{loss}]", file=sys.stderr)
    texts = complete(model, tokenizer, args.prompt, args.num_samples, args.max_new_tokens, args.seed, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    for n, text in enumerate(texts):
        print(("---\n" if n else "") + args.prompt + text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CheckpointError, TokenizerError, DeviceError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print("generate.py: out of memory; fewer --num_samples, or --device cpu, take less", file=sys.stderr)
        sys.exit(1)
