"""The plan of --dry_run beside what really happens: peak memory and time a step.

    python -m benchmarks.plan --data data/NAME [--preset config/gpt2_small.py] [--micro 1 2 4] [--key=value ...]

A preset on the present device. Memory is measured in a process of its own for each micro-batch: on
a GPU what PyTorch allocated at most, on a CPU the peak of resident memory during steps after the
first, less what the process holds at rest beyond weights and optimiser (Python, libraries, compiled
code). Time is the plan's beside that of train.py, from its log.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import hardware
from benchmarks import write
from formats import run_folder

CHILD = """
import contextlib, ctypes, gc, json, sys, torch
import config, hardware
from training import plan
from training.run import Run
run = Run(config.load(sys.argv[1:]))
c, parameters, cuda = run.config, run.model.num_parameters(), run.device.type == "cuda"
if run.compiles:
    run.compile()
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
def steps(n):
    for _ in range(n):
        run.train_step(contextlib.nullcontext())
    hardware.synchronize(run.device)
steps(2)
gc.collect()
if cuda:
    torch.cuda.reset_peak_memory_stats()
    steps(3)
    peak = torch.cuda.max_memory_allocated()
else:
    ctypes.CDLL(None).malloc_trim(0)  # give back what is freed
    rest = status("VmRSS") - 4 * parameters - plan.moments(run.optimizer)
    open("/proc/self/clear_refs", "w").write("5")
    steps(3)
    peak = status("VmHWM") - rest
planned = plan.memory(run.model_config, parameters, plan.moments(run.optimizer), run.micro_batch, run.micro_batch < c.batch_size, run.dtype.itemsize == 2)
print(json.dumps({"micro_batch": run.micro_batch, "planned": planned["peak"], "measured": peak, "planned_seconds": plan.measure(run, 15.0)[0]}))
"""


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset", default="config/gpt2_small.py")
    parser.add_argument("--data", required=True)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=12, help="steps of the real run")
    args, extra = parser.parse_known_args(argv)
    common = [args.preset, f"--data_dir={args.data}", "--warmup_steps=2", *extra]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for micro in args.micro:
            settings = [*common, f"--batch_size={micro}", f"--checkpoint_dir={temporary}/{micro}"]
            out = subprocess.run(
                [sys.executable, "-c", CHILD, *settings], check=True, capture_output=True, text=True
            ).stdout
            row = json.loads(out.splitlines()[-1])
            run = [
                sys.executable,
                "train.py",
                *settings,
                f"--max_steps={args.steps}",
                "--log_interval=1",
                "--eval_interval=0",
                "--eval_batches=1",
                "--report_minutes=0",
            ]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
            speeds = [
                r["tokens_per_second"]
                for r in run_folder.read_log(Path(temporary) / str(micro))
                if "loss" in r
            ][args.steps // 2 :]  # the first half warms up
            row["measured_seconds"] = micro * 512 / statistics.median(speeds)
            rows.append(row)
            print(
                f"micro-batch {micro}: memory {row['planned'] / 1e9:.2f} GB planned,"
                f" {row['measured'] / 1e9:.2f} measured"
                f" ({row['planned'] / row['measured'] - 1:+.1%}); step {row['planned_seconds']:.2f}"
                f" s planned, {row['measured_seconds']:.2f} measured"
                f" ({row['planned_seconds'] / row['measured_seconds'] - 1:+.1%})",
                flush=True,
            )
    write(f"plan_{Path(args.preset).stem}", hardware.find_device("auto"), {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
