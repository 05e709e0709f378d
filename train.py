"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]

The loop: when to step, log, evaluate, save and stop. What a run is stands in run.py, the parts of a step in step.py, all
settings in config/__init__.py (or --help). Stopped in any way, the same command continues the run.
"""
import gc
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import checkpoint
import config as settings
import hardware
import terminal
from checkpoint import CheckpointError
from config import Config, ConfigError
from dataset import DataError
from guard import Lock, RunError, Signals, Stop, leave, out_of_memory
from hardware import DeviceError
from loggers import Report
from plan import plan
from profiling import Profiler
from run import Run
from terminal import duration
from tokenizer_bpe import TokenizerError


class Clock:
    """Seconds of training: between start() and stop(), with the device's work waited for."""

    def __init__(self, run: Run):
        self.run, self.since_log = run, 0.0
        self.start()

    def start(self):
        """Training goes on."""
        self.mark = time.perf_counter()

    def stop(self):
        """Add what has passed since start()."""
        hardware.synchronize(self.run.device)
        passed = time.perf_counter() - self.mark
        self.run.progress.elapsed_s += passed
        self.since_log += passed
        self.start()


def train(config: Config) -> None:
    """A whole run, from its settings to the last checkpoint."""
    signals, folder, lock = Signals(), Path(config.checkpoint_dir), None
    try:
        if folder.is_dir() and not config.dry_run:
            lock = Lock(folder)  # before anything in it is read
        run = Run(config)
        print(run.banner(), flush=True)
        if config.dry_run:
            return print("\n" + plan(run))
        if run.progress.step >= run.total_steps and not run.evaluation_due:
            return print(f"finished already, at step {run.progress.step:,}. To train longer raise epochs or max_steps. To generate:\n  {generate_command(run)}")
        folder.mkdir(parents=True, exist_ok=True)
        if not lock:
            lock = Lock(folder)
            if checkpoint.steps(folder):
                raise RunError(f"another trainer has just begun in {folder}; start the same command again to continue its run")
        finish(run, signals)
    except Stop as stop:
        leave(stop.signum, "no step was done yet")
    finally:
        if lock:
            lock.release()


def finish(run: Run, signals: Signals) -> None:
    """From the step where a run is to its last one, or to a signal; either way its state is on the disk then."""
    folder, begun, report = run.folder, run.progress.step, Report(run.folder, run.config.report_minutes)
    try:
        checkpoint.set_aside(folder, run.progress.step)
        checkpoint.write_json(folder / "config.json", asdict(run.config))
        run.begin_log()
        ending = loop(run, signals, report)
        with signals:
            saved = run.save_now()
        drawn = report.finish()
    except Stop as stop:
        signals.held = True  # the save that follows is not stopped but by a second Ctrl-C
        if run.progress.step == begun == 0:
            raise
        step = f"step {run.progress.step:,}"
        leave(stop.signum, f"{step} is saved in {folder}; the same command continues" if run.save_now() else f"{step} could not be saved; the last checkpoint is step {run.saver.saved:,}")
    finally:
        report.stop()
        if run.loggers:
            run.loggers.close()
    if not saved:
        last = f"the last checkpoint there is step {run.saver.saved:,}" if run.saver.saved else "there is no checkpoint yet"
        raise RunError(f"step {run.progress.step:,} could not be saved in {folder}, {last}; make room or choose another checkpoint_dir, and start the same command again")
    print(f"\n{loss_curve(run)}\n\n{ending}: {run.progress.step:,} steps, {run.tokens:,} tokens in {duration(run.progress.elapsed_s)} of training" + (f", cost {run.cost:.2f}" if run.cost else ""))
    print(f"best validation loss {run.best:.4f}, kept in {checkpoint.find(folder)}" if run.best < float("inf") else f"the last checkpoint is {checkpoint.find(folder)}")
    print(f"  {generate_command(run)}\n  " + (f"report: {drawn}" if drawn else f"python -m tools.report {folder}"))


def loss_curve(run: Run) -> str:
    """The run's losses in characters, from its log: that of all its starts."""
    training, validation = [], []
    for record in checkpoint.iterate_log(run.folder):
        for points, name in ((training, "loss"), (validation, "val_loss")):
            if name in record:
                points.append((record["step"], record[name]))
    return terminal.curve(training, validation)


def loop(run: Run, signals: Signals, report: Report) -> str:
    """Step until the run is done or its budget is; log, save and evaluate on the way. Returns how it ended, in a word or two."""
    config, progress = run.config, run.progress
    tokens_per_step = config.batch_size * config.block_size
    clock, logged, printed, line = Clock(run), progress.step, 0.0, {}
    run.saver.reserve(run.model.state_dict())
    if run.compiles and progress.step < run.total_steps:
        print("compiling ...", end=" ", flush=True)
        problem = run.compile()
        clock.stop()
        print(f"failed; training goes on without it. {problem}" if problem else f"{clock.since_log:.1f} s", flush=True)
        clock.since_log = 0.0
    gc.collect()
    gc.freeze()  # modules and compiled code stay: the collector took 0.25 s each time that it looked through them
    profiler = Profiler(run.folder, run.device, run.profiled) if config.profile else None
    bar = tqdm(total=run.total_steps, initial=progress.step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    while True:
        if run.save_due or run.evaluation_due:
            clock.stop()
            if run.save_due:
                with signals:
                    run.save()
            if run.evaluation_due:
                loss, samples = run.evaluate()
                speed = line.get("tokens_per_second")
                left = speed and (run.total_steps - progress.step) * tokens_per_step / speed
                tqdm.write(terminal.evaluation(progress.step, run.total_steps, run.epoch, line.get("loss"), loss, run.bits_per_byte(loss), run.best, speed, run.cost, left))
                if samples:
                    tqdm.write(terminal.samples(samples))
                sys.stdout.flush()
                report.refresh()
            clock.start()
        if progress.step >= run.total_steps or run.over_budget:
            break
        norm = run.train_step(signals)
        bar.update()
        if profiler:
            profiler.step()
        if progress.step % min(config.log_interval, config.max_bad_steps) == 0:
            run.check_numbers()
        if progress.step % config.log_interval == 0 or progress.step == run.total_steps:
            with signals:
                clock.stop()
                speed = (progress.step - logged) * tokens_per_step / clock.since_log
                line = run.log_step(float(norm), speed)
                logged, clock.since_log = progress.step, 0.0
            loss = f"{line['loss']:.4f}" if line["loss"] is not None else "no number"
            bar.set_postfix_str(f"loss {loss}, {speed:,.0f} tok/s, MFU " + (f"{line['mfu']:.1%}" if line["mfu"] else "n/a") + (f", cost {line['cost']:.2f}" if line["cost"] else ""))
            if bar.disable and time.monotonic() > printed + 20:
                printed = time.monotonic()
                left = duration((run.total_steps - progress.step) * tokens_per_step / speed)
                print(f"step {progress.step:,} of {run.total_steps:,}: loss {loss}, {speed:,.0f} tokens/s, {left} left", flush=True)
    bar.close()
    return "finished" if progress.step >= run.total_steps else f"stopped by {run.over_budget}; raise it to go on"


def generate_command(run: Run) -> str:
    """The command that generates from a run."""
    return f"python generate.py --checkpoint {run.folder} --prompt TEXT"


def main(argv: list[str]) -> None:
    """The command line's work, with errors as sentences."""
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    try:
        train(settings.load(argv))
    except (ConfigError, DataError, TokenizerError, CheckpointError, DeviceError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except (RunError, OSError) as error:
        print(f"\ntrain.py: {error}", file=sys.stderr)
        sys.exit(1)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print("train.py: out of memory before the first step: weights, AdamW or data do not fit. What takes less: n_layer, n_embd, data_location = mmap", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
