"""How long training waits for a save, beside a plain torch.save of the same state.

    python -m benchmarks.save_pause [--rounds 5] [--folder FOLDER] [--key=value ...]

GPT-2 Small's 134M weights with AdamW's state, 1.6 GB. Both in turn, in one process, to the same
file system.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import config
import hardware
from benchmarks import argument_parser, gpt2_small, median_ratio, write
from formats import run_folder
from model import GPT
from training.optimizer import make_optimizer
from training.saver import Saver


def state_on(device, arguments):
    """The model and optimiser state of GPT-2 Small after one step; arguments: what differs."""
    model = GPT(gpt2_small(*arguments)).to(device)
    optimizer = make_optimizer(model, config.load(["config/gpt2_small.py", *arguments]), device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def one_round(n, saver, model, optimizer, plain_file, device):
    """Seconds of torch.save, of our pause, and until ours is on the disk with checksums."""
    hardware.synchronize(device)
    start = time.perf_counter()
    torch.save({"model": model, "optimizer": optimizer}, plain_file)
    plain = time.perf_counter() - start
    start = time.perf_counter()
    saver.save({"step": n}, model, optimizer, "{}")
    pause = time.perf_counter() - start
    saver.wait()
    whole = time.perf_counter() - start
    assert saver.saved == n
    print(
        f"round {n + 1}: torch.save {plain:.2f} s, pause {pause:.3f} s = {pause / plain:.1%},"
        f" on the disk with checksums after {whole:.2f} s",
        flush=True,
    )
    return {"torch_save_s": plain, "pause_s": pause, "until_on_disk_s": whole}


def main(argv):
    """The command line's work."""
    parser = argument_parser("save_pause", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args, extra = parser.parse_known_args(argv)
    device = hardware.find_device(config.load(extra).device)
    model, optimizer = state_on(device, extra)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        saver = Saver(folder / "run", 1)
        saver.reserve([t for t in model.values() for _ in range(3)])
        saver.wait()  # as during compilation
        rounds = [
            one_round(n, saver, model, optimizer, folder / "plain.pt", device)
            for n in range(args.rounds)
        ]
    ratio = round(median_ratio(rounds, "pause_s", "torch_save_s"), 4)
    result = {
        "bytes": run_folder.tensor_bytes(model) + run_folder.tensor_bytes(optimizer),
        "rounds": rounds,
        "pause_over_torch_save_median": ratio,
    }
    write("save_pause", device, result)
    print(f"the pause is {ratio:.1%} of torch.save (median)")


if __name__ == "__main__":
    main(sys.argv[1:])
