"""How long training waits for a save, beside a plain torch.save of the same state.

    python -m benchmarks.save_pause [--rounds 5] [--data data/NAME]

GPT-2 Small's 134M weights with AdamW's state, 1.6 GB. Both in turn, in one process, to the same
file system.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import config
import hardware
from benchmarks import write
from formats import run_folder
from model import GPT, GPTConfig
from training.optimizer import make_optimizer
from training.saver import Saver


def state_on(device):
    """The model and optimiser state of GPT-2 Small after one step."""
    c = config.load(["config/gpt2_small.py"])
    model = GPT(
        GPTConfig(
            32000, c.block_size, c.n_layer, c.n_head, c.n_embd, c.bias, c.dropout, c.tie_weights
        )
    ).to(device)
    optimizer = make_optimizer(model, c, device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_pause", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    model, optimizer = state_on(device)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        saver = Saver(folder / "run", 1)
        saver.reserve([t for t in model.values() for _ in range(3)])
        saver.wait()  # as during compilation
        rounds = []
        for n in range(args.rounds):
            hardware.synchronize(device)
            start = time.perf_counter()
            torch.save({"model": model, "optimizer": optimizer}, folder / "plain.pt")
            plain = time.perf_counter() - start
            start = time.perf_counter()
            saver.save({"step": n}, model, optimizer, "{}")
            pause = time.perf_counter() - start
            saver.wait()
            whole = time.perf_counter() - start
            assert saver.saved == n
            rounds.append({"torch_save_s": plain, "pause_s": pause, "until_on_disk_s": whole})
            print(
                f"round {n + 1}: torch.save {plain:.2f} s, pause {pause:.3f} s ="
                f" {pause / plain:.1%}, on the disk with checksums after {whole:.2f} s",
                flush=True,
            )
    result = {
        "bytes": run_folder.tensor_bytes(model) + run_folder.tensor_bytes(optimizer),
        "rounds": rounds,
        "pause_over_torch_save_median": round(
            statistics.median(r["pause_s"] / r["torch_save_s"] for r in rounds), 4
        ),
    }
    write("save_pause", device, result)
    print(f"the pause is {result['pause_over_torch_save_median']:.1%} of torch.save (median)")


if __name__ == "__main__":
    main(sys.argv[1:])
