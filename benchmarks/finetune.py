"""Speed of fine-tuning: our training step and a plain loop over the same model in transformers.

    python -m benchmarks.finetune --base FOLDER --data data/NAME [--steps 12] [--key=value ...]

FOLDER is in Hugging Face's format, and the data prepared with its tokenizer. The plain loop is the
usual one: weights in float32, fused AdamW, clipped gradients, the loss of transformers' model; once
as it is, once with autocast to the dtype of our run, once compiled too. All see the same windows,
and take their steps in turn in one process, since a machine's speed drifts; ratios are taken step
by step, after two steps to warm up. The memory has to hold two models and their optimizers.
"""

import tempfile
from collections.abc import Callable
from functools import partial

import torch

import config as settings
import hardware
from benchmarks import argument_parser, compare, in_turn, report, run_main, seconds
from benchmarks.throughput import TIMED
from command_line import count, place
from config import Config
from formats.data_folder import read_meta
from train import training_step
from training.dataset import Dataset
from training.fit import fit_in_memory
from training.setup import build

PRESET = "config/finetune.py"
WARM_UP = 2  # steps; the first one compiles


def our_step(c: Config) -> Callable:
    """A function that takes one step of the run that train.py would begin."""
    run = build(c)
    if problem := fit_in_memory(run):
        raise SystemExit(problem)
    return lambda: training_step(run)


def plain_step(c: Config, dtype: torch.dtype, compiles: bool) -> Callable:
    """A function that takes one step of fine-tuning c.init_from with transformers."""
    from transformers import AutoModelForCausalLM

    device = hardware.find_device(c.device)
    model = AutoModelForCausalLM.from_pretrained(c.init_from, dtype=torch.float32).to(device)
    model.train()
    forward = torch.compile(model, dynamic=False) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, fused=True)
    data = Dataset(c.data_dir, read_meta(c.data_dir), "train", c.block_size, device)
    micro = c.micro_batch_size or c.batch_size
    begins = iter(range(0, 10**9, micro))

    def step():
        for _ in range(0, c.batch_size, micro):
            x, _ = data.batch(next(begins), micro, c.seed)
            with hardware.autocast(device, dtype):
                loss = forward(input_ids=x, labels=x, use_cache=False).loss
            (loss * micro / c.batch_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed(c: Config, step: Callable) -> float:
    """Tokens/s of one step."""
    return c.tokens_per_step / seconds(step, hardware.find_device(c.device))


def main(argv):
    parser = argument_parser("finetune", __doc__)
    parser.add_argument("--base", type=place, required=True, help="weights to start from")
    text = "folder that was prepared with the tokenizer of --base"
    parser.add_argument("--data", type=place, required=True, help=text)
    parser.add_argument("--steps", type=count, default=12, help="of each; default %(default)s")
    args, extra = parser.parse_known_args(argv)
    words = [PRESET, f"--init_from={args.base}", f"--data_dir={args.data}", *TIMED, *extra]
    figures, all_turns = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        c = settings.load([*words, f"--checkpoint_dir={folder}/run", "--max_steps=1000000"])
        device = hardware.find_device(c.device)
        step, dtype = our_step(c), hardware.find_dtype(device, c.dtype)
        for how in dict.fromkeys([(torch.float32, False), (dtype, False), (dtype, True)]):
            theirs = plain_step(c, *how)
            name = f"transformers, {str(how[0]).removeprefix('torch.')}" + ", compiled" * how[1]
            contenders = {"ours": partial(speed, c, step), name: partial(speed, c, theirs)}
            all_turns[name] = in_turn(contenders, WARM_UP + args.steps)[WARM_UP:]
            figures |= compare(all_turns[name], "ours")
            del theirs, contenders
    report("finetune", figures, device, settings=words, turns=all_turns)


if __name__ == "__main__":
    run_main("finetune", main)
