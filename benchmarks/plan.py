"""The plan of --dry_run beside what really happens: peak memory and time a step.

    python -m benchmarks.plan --data data/NAME [--preset FILE] [--micro 1 2 4] [--key=value ...]

A preset on the present device. Memory is measured in a process of its own for each micro-batch: on
a GPU what PyTorch allocated at most, the tokens aside; on a CPU the peak of resident memory during
steps after the first, less what the process holds at rest beyond weights and optimiser (Python,
libraries, compiled code). Time is the plan's beside that of train.py, from its log.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import config
import hardware
from benchmarks import argument_parser, measure_apart, train, write
from training import plan, trial
from training.setup import build


def resident(name):
    """Bytes of resident memory, as Linux tells: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


def take_steps(run, count):
    """So many optimiser steps, to their end."""
    for _ in range(count):
        run.trainer.step()
    hardware.synchronize(run.device.torch)


def peak_memory(run):
    """Bytes that steps take beyond what the process holds at rest."""
    take_steps(run, 2)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        take_steps(run, 3)
        data = (run.data.train, run.data.val)
        tokens = sum(part.bytes for part in data if part and part.location == "gpu")
        return torch.cuda.max_memory_allocated() - tokens
    ctypes.CDLL(None).malloc_trim(0)  # give back what is freed
    of_model = 4 * run.state.model.num_parameters() + plan.moments(run.state.optimizer)
    at_rest = resident("VmRSS") - of_model
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    take_steps(run, 3)
    return resident("VmHWM") - at_rest


def measure(settings):
    """Planned and measured memory, in bytes, and planned seconds a step, in this process."""
    run = build(config.load(settings))
    problem = run.trainer.compile() if run.compiles else None
    if problem:
        print(f"compiling failed, so without it: {problem}")
    measured = peak_memory(run)
    micro_batch = run.micro_batch.training
    planned = plan.memory_of(run, micro_batch, run.device.dtype, run.device.memory)
    return {
        "micro_batch": micro_batch,
        "planned": planned["peak"],
        "measured": measured,
        "planned_seconds": trial.measure(run, 15.0).step_s,
    }


def seconds_a_step(settings, steps):
    """Seconds a step of train.py, from its log; the first half of the steps warms up."""
    c = config.load(settings)
    log = train(
        *settings,
        f"--max_steps={steps}",
        "--log_interval=1",
        "--eval_interval=0",
        "--eval_batches=1",
    )
    speeds = [record["tokens_per_second"] for record in log if "loss" in record]
    return c.batch_size * c.block_size / statistics.median(speeds[steps // 2 :])


def show(row):
    """Print a row: planned, measured, and by how much the plan is off."""
    off = row["planned"] / row["measured"] - 1
    print(
        f"micro-batch {row['micro_batch']}: memory {row['planned'] / 1e9:.2f} GB planned,"
        f" {row['measured'] / 1e9:.2f} measured ({off:+.1%})"
    )
    off = row["planned_seconds"] / row["measured_seconds"] - 1
    print(
        f"  step {row['planned_seconds']:.2f} s planned,"
        f" {row['measured_seconds']:.2f} measured ({off:+.1%})",
        flush=True,
    )


def main(argv):
    """The command line's work."""
    parser = argument_parser("plan", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    parser.add_argument("--data", required=True)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=12, help="steps of the real run")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # for measure_apart
    args, extra = parser.parse_known_args(argv)
    common = [args.preset, f"--data_dir={args.data}", "--warmup_steps=2", *extra]
    if args.here:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(measure([*common, f"--checkpoint_dir={temporary}/run"])))
        return
    rows = []
    for micro in args.micro:
        own = [*extra, f"--batch_size={micro}"]
        row = measure_apart("plan", "--here", "--preset", args.preset, "--data", args.data, *own)
        row["measured_seconds"] = seconds_a_step([*common, f"--batch_size={micro}"], args.steps)
        show(row)
        rows.append(row)
    device = hardware.find_device(config.load(common).device)
    write(f"plan_{Path(args.preset).stem}", device, {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
