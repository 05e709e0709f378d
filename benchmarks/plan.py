"""The plan of --dry_run compared with what really happens: peak memory and time a step.

    python -m benchmarks.plan --data data/NAME [--preset FILE] [--micro 1 2 4] [--key=value ...]

A preset on this device, memory in a process of its own for each micro-batch: on a GPU what PyTorch
allocated at most, without the tokens; on a CPU the peak of resident memory during steps after the
first, less what the process holds at rest beyond weights and optimiser (Python, libraries, compiled
code). The time is the plan's, compared with that in the log of train.py.
"""

import ctypes
import gc
import re
import statistics
import tempfile
from pathlib import Path

import torch

import config
import hardware
from benchmarks import argument_parser, run_apart, run_main, train, write
from tools.command import count
from training import plan, trial
from training.setup import build


def measure(settings: list[str]) -> dict:
    """Planned and measured memory, in bytes, and planned seconds a step, in this process."""
    run = build(config.load(settings))
    problem = run.trainer.compile() if run.compiles else None
    if problem:
        print(f"compiling failed: {problem}")
    measured = peak_memory(run)
    micro_batch = run.micro_batch.size
    planned = plan.memory(run.config, run.state, micro_batch, run.device)
    return {
        "micro_batch": micro_batch,
        "planned": planned["peak"],
        "measured": measured,
        "planned_seconds": trial.measure(run, 15.0).step_s,
    }


def peak_memory(run) -> int:
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
    at_rest = resident("VmRSS") - plan.checkpoint_bytes(run.state)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    take_steps(run, 3)
    return resident("VmHWM") - at_rest


def take_steps(run, count: int) -> None:
    for _ in range(count):
        run.trainer.step()
    hardware.synchronize(run.device.torch)


def resident(name: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])


def seconds_a_step(settings: list[str], steps: int) -> float:
    """Seconds a step of train.py, from its log; the first half of the steps warms up."""
    quiet = ["--log_interval=1", "--eval_interval=0", "--eval_batches=1"]
    log = train(*settings, *quiet, f"--max_steps={steps}")
    speeds = [record["tokens_per_second"] for record in log if "loss" in record]
    c = config.load(settings)
    return c.batch_size * c.block_size / statistics.median(speeds[steps // 2 :])


def main(argv):
    parser = argument_parser("plan", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    parser.add_argument("--data", required=True)
    parser.add_argument("--micro", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=count, default=12, help="steps of the real run")
    args, extra = parser.parse_known_args(argv)
    common = [args.preset, f"--data_dir={args.data}", "--warmup_steps=2", *extra]
    rows = []
    for micro in args.micro:
        settings = [*common, f"--batch_size={micro}"]
        with tempfile.TemporaryDirectory() as folder:
            row = run_apart(measure, [*settings, f"--checkpoint_dir={folder}/run"])
        row["measured_seconds"] = seconds_a_step(settings, args.steps)
        rows.append(row)
        memory = row["planned"] / row["measured"] - 1
        seconds = row["planned_seconds"] / row["measured_seconds"] - 1
        print(
            f"micro-batch {row['micro_batch']}: memory {row['planned'] / 1e9:.2f} GB planned,"
            f" {row['measured'] / 1e9:.2f} measured ({memory:+.1%}); step"
            f" {row['planned_seconds']:.2f} s planned, {row['measured_seconds']:.2f} measured"
            f" ({seconds:+.1%})",
            flush=True,
        )
    device = hardware.find_device(config.load(common).device)
    memory = [abs(row["planned"] / row["measured"] - 1) for row in rows]
    times = [abs(row["planned_seconds"] / row["measured_seconds"] - 1) for row in rows]
    figures = {"memory off by": max(memory), "time off by": max(times)}
    write(f"plan_{Path(args.preset).stem}", {"figures": figures, "rows": rows}, device)


if __name__ == "__main__":
    run_main(main)
