"""Speed of fine-tuning: train.py and a plain loop over the same model in transformers.

    python -m benchmarks.finetune --base FOLDER --data data/NAME [--rounds 3] [--steps 12]
        [--key=value ...]

FOLDER is in Hugging Face's format, and the data prepared with its tokenizer. The plain loop is the
usual one: weights in float32, fused AdamW, clipped gradients, the loss of transformers' model; once
as it is, once with autocast to bfloat16, once compiled too. All see the same windows. A contender's
speed is the median of its steps without the first ones.
"""

import itertools
import statistics
import time
from functools import partial

import torch

import config as settings
import hardware
from benchmarks import argument_parser, compare, in_turn, report, run_apart, run_main
from benchmarks.throughput import SKIPPED, TIMED, our_speed
from command_line import count, place
from config import Config
from formats.data_folder import read_meta
from training.dataset import Dataset

PRESET = "config/finetune.py"
LOOPS = {  # transformers: autocast to bfloat16, compiled
    "transformers, float32": (False, False),
    "transformers, bfloat16": (True, False),
    "transformers, bfloat16, compiled": (True, True),
}


def plain_speed(c: Config, steps: int, in_bf16: bool, compiles: bool) -> float:
    """Tokens/s of fine-tuning c.init_from with transformers."""
    from transformers import AutoModelForCausalLM

    device = hardware.find_device(c.device)
    model = AutoModelForCausalLM.from_pretrained(c.init_from, dtype=torch.float32).to(device)
    model.train()
    forward = torch.compile(model, dynamic=False) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, fused=True)
    data = Dataset(c.data_dir, read_meta(c.data_dir), "train", c.block_size, device)
    micro = c.micro_batch_size or c.batch_size
    stamps = []
    for step in range(steps + 1):
        stamps.append(time.perf_counter())
        for begin in range(0, c.batch_size, micro):
            x, _ = data.batch(step * c.batch_size + begin, micro, c.seed)
            with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
                loss = forward(input_ids=x, labels=x, use_cache=False).loss
            (loss * micro / c.batch_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    times = [b - a for a, b in itertools.pairwise(stamps)]
    return c.tokens_per_step / statistics.median(times[SKIPPED:])


def main(argv):
    parser = argument_parser("finetune", __doc__)
    parser.add_argument("--base", type=place, required=True, help="weights to start from")
    text = "folder that was prepared with the tokenizer of --base"
    parser.add_argument("--data", type=place, required=True, help=text)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=12, help="in a round; default %(default)s")
    args, extra = parser.parse_known_args(argv)
    words = [PRESET, f"--init_from={args.base}", f"--data_dir={args.data}", *TIMED, *extra]
    c = settings.load(words)
    contenders = {"ours": partial(our_speed, words, args.steps)}
    for name, how in LOOPS.items():
        contenders[name] = partial(run_apart, plain_speed, c, args.steps, *how)
    rounds = in_turn(contenders, args.rounds)
    figures = compare(rounds, "ours")
    report("finetune", figures, hardware.find_device(c.device), settings=words, rounds=rounds)


if __name__ == "__main__":
    run_main("finetune", main)
