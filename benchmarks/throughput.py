"""Training speed of train.py beside nanoGPT's, whole scripts both, at the shape of a preset.

    python -m benchmarks.throughput [--preset config/gpt2_small.py] [--nanogpt PATH] [--rounds 3] [--steps 8] [--key=value ...]

Each round starts every contender once, in turn, on the same tokens; a contender's time a step is
the median of its steps in a round, the first few (compilation, warm-up) left out. Ratios are taken
round by round, so that a machine whose speed drifts still compares fairly. PATH is a checkout of
nanoGPT; it runs from a copy outside this repository, as it comes, and on a CPU also with the bf16
autocast that it lacks there. Ours runs once more with --profile for the share of a step outside
forward, backward and optimiser.
"""

import argparse
import itertools
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import config as settings
import hardware
from benchmarks import write
from formats import run_folder
from training.dataset import read_meta
from training.setup import model_config

# Runs a script as `python SCRIPT ARGUMENTS` does, and tells how much memory it took: on a GPU as
# its allocator counts, else resident.
WITH_PEAK = """
import runpy, sys
sys.argv, sys.path[0] = sys.argv[1:], ""
runpy.run_path(sys.argv[0], run_name="__main__")
import resource, torch
print("peak bytes", torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def run_script(arguments, cwd):
    """The lines that a training script prints, each with the moment at which it came, and its peak
    memory in bytes.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", WITH_PEAK, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [(time.perf_counter(), line) for line in process.stdout]
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return lines, int(lines[-1][1].split()[-1])


def ours(c, extra, steps, every, folder, profile=False):
    """Seconds a step of train.py, of each `every` steps, from its log, and peak memory; with
    profile: seconds a step of each part of it.
    """
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    quiet = [
        f"--log_interval={every}",
        "--eval_interval=0",
        "--save_interval=0",
        "--eval_batches=1",
        "--report_minutes=0",
        f"--max_steps={steps}",
        f"--checkpoint_dir={run}",
    ]
    peak = run_script(
        ["train.py", *extra, *quiet, f"--profile={profile}", f"--compile={c.compile is not False}"],
        None,
    )[1]
    log = run_folder.read_log(run)
    if profile:
        return next(r["seconds_a_step"] for r in log if r.get("event") == "profile")
    return [c.batch_size * c.block_size / r["tokens_per_second"] for r in log if "loss" in r], peak


def prepare_nanogpt(path, c, every, folder, autocast):
    """A copy of the checkout with the same tokens beside it, and the command that trains the same
    shape.
    """
    copy = folder / f"nanogpt_{autocast}"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "same"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (data / name).symlink_to((Path(c.data_dir) / name).absolute())
    with open(data / "meta.pkl", "wb") as f:
        pickle.dump({"vocab_size": model_config(c, read_meta(c.data_dir)).vocab_size}, f)
    if autocast:
        script = copy / "train.py"
        text = script.read_text()
        plain = "nullcontext() if device_type == 'cpu' else "
        assert plain in text, "this nanoGPT chooses autocast in another way"
        script.write_text(text.replace(plain, ""))
    micro = c.micro_batch_size or c.batch_size
    device = hardware.find_device(c.device)
    return copy, [
        "train.py",
        "--dataset=same",
        f"--device={device.type}",
        f"--n_layer={c.n_layer}",
        f"--n_head={c.n_head}",
        f"--n_embd={c.n_embd}",
        f"--block_size={c.block_size}",
        f"--batch_size={micro}",
        f"--gradient_accumulation_steps={c.batch_size // micro}",
        f"--bias={c.bias}",
        f"--dropout={c.dropout}",
        f"--compile={c.compile is not False}",
        "--dtype=bfloat16",
        "--eval_iters=1",
        "--eval_interval=1000000",
        f"--log_interval={every}",
        "--always_save_checkpoint=False",
    ]


def nanogpt(prepared, steps):
    """Seconds a step of nanoGPT's train.py, of each `every` steps, from when its lines came, and
    peak memory.
    """
    copy, command = prepared
    lines, peak = run_script([*command, f"--max_iters={steps}"], copy)
    stamps = [
        (int(found[1]), at) for at, line in lines if (found := re.match(r"iter (\d+): loss", line))
    ]
    return [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(stamps)], peak


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset", default="config/gpt2_small.py")
    parser.add_argument("--nanogpt", metavar="PATH", help="checkout of nanoGPT to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps in a round; default: 8, on a GPU 100")
    parser.add_argument(
        "--skip",
        type=int,
        default=3,
        help=(
            "first measurements of a round that do not count: of a step each, on a GPU of ten,"
            " since to look at each would make it wait"
        ),
    )
    parser.add_argument(
        "--name", help="name of the result file; default: throughput_ and the preset's"
    )
    args, extra = parser.parse_known_args(argv)
    extra = [args.preset, *extra]
    c = settings.load(extra)
    device = hardware.find_device(c.device)
    every, steps = (10, args.steps or 100) if device.type == "cuda" else (1, args.steps or 8)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        contenders = {"ours": lambda: ours(c, extra, steps, every, folder)}
        if args.nanogpt:
            as_it_comes = prepare_nanogpt(args.nanogpt, c, every, folder, False)
            contenders["nanoGPT"] = lambda: nanogpt(as_it_comes, steps)
            if device.type == "cpu":
                with_autocast = prepare_nanogpt(args.nanogpt, c, every, folder, True)
                contenders["nanoGPT with bf16 autocast"] = lambda: nanogpt(with_autocast, steps)
        rounds, peaks = [], dict.fromkeys(contenders, 0)
        for n in range(args.rounds):
            rounds.append({})
            for name, run in contenders.items():
                times, peak = run()
                rounds[-1][name], peaks[name] = (
                    statistics.median(times[args.skip :]),
                    max(peak, peaks[name]),
                )
            print(
                f"round {n + 1}: "
                + ", ".join(
                    f"{name} {c.batch_size * c.block_size / s:,.0f} tokens/s"
                    for name, s in rounds[-1].items()
                ),
                flush=True,
            )
        parts = ours(c, extra, 10, every, folder, profile=True)
    model, peak = model_config(c, read_meta(c.data_dir)), hardware.peak_flops(device)
    result = {
        "dtype": str(hardware.find_dtype(device, c.dtype)),
        "model": vars(model),
        "tokens_a_step": c.batch_size * c.block_size,
        "seconds_a_step_by_round": rounds,
        "tokens_per_second_median": {
            name: round(c.batch_size * c.block_size / statistics.median(r[name] for r in rounds), 1)
            for name in rounds[0]
        },
        "peak_bytes": peaks,
        "ours_profile_seconds_a_step": parts,
        "ours_share_outside_forward_backward_optimizer": round(
            (parts["data"] + parts["other"]) / sum(parts.values()), 5
        ),
        "ours_over": {
            name: round(statistics.median(r[name] / r["ours"] for r in rounds), 3)
            for name in rounds[0]
            if name != "ours"
        },
    }
    for name, speed in result["tokens_per_second_median"].items():
        ratio = f"   ours is {result['ours_over'][name]:.2f}x" if name != "ours" else ""
        print(f"{name:30}{speed:12,.0f} tokens/s{peaks[name] / 1e9:8.2f} GB{ratio}")
    print(
        "outside forward, backward and optimiser:"
        f" {result['ours_share_outside_forward_backward_optimizer']:.2%} of a step of ours"
    )
    write(args.name or f"throughput_{Path(args.preset).stem}", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
