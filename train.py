"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py config/gpt2_small.py      # on 8 GPUs

The loop: when to step, log, evaluate, save and stop. What a run is stands in training/run.py, the
parts of a step in training/step.py, all settings in config/__init__.py (or --help). Stopped in any
way, the same command continues the run.
"""

import gc
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import config as settings
import hardware
from config import Config, ConfigError
from formats import files, run_folder
from formats.run_folder import CheckpointError
from hardware import DeviceError, out_of_memory
from tokenizer_bpe import TokenizerError
from training import ranks, terminal
from training.dataset import DataError
from training.guard import Lock, RunError, Signals, Stop, leave
from training.loggers import Report
from training.plan import plan
from training.profiling import STEPS, WARMUP, Profiler
from training.run import Run
from training.terminal import duration


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
    if config.batch_size % ranks.count:
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared by {ranks.count} processes; the"
            f" next larger that can is {-(-config.batch_size // ranks.count) * ranks.count}"
        )
    if config.dry_run and not ranks.alone:
        raise ConfigError("dry_run = True plans for one process; start it without torchrun")
    try:
        if folder.is_dir() and ranks.main and not config.dry_run:
            lock = Lock(folder)  # before anything in it is read
        run = Run(config)
        print(run.banner(), flush=True)
        if config.dry_run:
            return print("\n" + plan(run))
        if run.progress.step >= run.total_steps and not run.evaluation_due:
            return print(
                f"finished already, at step {run.progress.step:,}. To train longer raise epochs or"
                f" max_steps. To generate:\n  {generate_command(run)}"
            )
        if ranks.main:
            folder.mkdir(parents=True, exist_ok=True)
        if ranks.main and not lock:
            lock = Lock(folder)
            if run_folder.steps(folder):
                raise RunError(
                    f"another trainer has just begun in {folder}; start the same command again to"
                    " continue its run"
                )
        finish(run, signals)
    except Stop as stop:
        leave(stop.signum, "no step was done yet")
    finally:
        if lock:
            lock.release()


def finish(run: Run, signals: Signals) -> None:
    """From the step where a run is to its last one, or to a signal; either way its state is on the
    disk then.
    """
    folder, begun, report = (
        run.folder,
        run.progress.step,
        Report(run.folder, run.config.report_minutes * ranks.main),
    )
    try:
        if ranks.main:
            run_folder.set_aside(folder, run.progress.step)
            files.write_json(folder / "config.json", asdict(run.config))
            run.begin_log()
            run.saver.reserve(run.copied())
        ending = loop(run, signals, report)
        with signals:
            saved = run.save_now()
        if not ranks.main:
            return
        curve = loss_curve(run)
        drawn = report.finish() if curve else None
    except (Stop, ranks.Lost) as end:
        signals.held = True  # the save that follows is not stopped but by a second Ctrl-C
        if run.progress.step == begun == 0:
            raise
        step = f"step {run.progress.step:,}"
        # The GPU's queue may hold a sum that will never come, with a process that has ended.
        reachable = isinstance(end, Stop) or hardware.catches_up(run.device, 20)
        saved = reachable and run.save_now()
        message = (
            f"{step} is saved in {folder}; the same command continues"
            if saved
            else f"{step} could not be saved; the last checkpoint is step {run.saver.saved:,}"
        )
        if isinstance(end, Stop):
            leave(end.signum, message)
        print(f"\na process of the run has ended; {message}", flush=True)
        raise
    finally:
        report.stop()
        if run.loggers:
            run.loggers.close()
    if not saved:
        last = (
            f"the last checkpoint there is step {run.saver.saved:,}"
            if run.saver.saved
            else "there is no checkpoint yet"
        )
        raise RunError(
            f"step {run.progress.step:,} could not be saved in {folder}, {last}; make room or"
            " choose another checkpoint_dir, and start the same command again"
        )
    cost = f", cost {run.cost:.2f}" if run.cost else ""
    print(
        (f"\n{curve}\n" if curve else "")
        + f"\n{ending}: {run.progress.step:,} steps, {run.tokens:,} tokens in"
        f" {duration(run.progress.elapsed_s)} of training{cost}"
    )
    if not run.saver.saved:
        return  # the budget took not a step
    print(
        f"best validation loss {run.saver.best:.4f}, kept in {run_folder.find(folder)}"
        if run.saver.best < float("inf")
        else f"the last checkpoint is {run_folder.find(folder)}"
    )
    print(
        f"  {generate_command(run)}\n  "
        + (f"report: {drawn}" if drawn else f"python -m tools.report {folder}" if curve else "")
    )


def loss_curve(run: Run) -> str:
    """The run's losses in characters, from its log: that of all its starts."""
    training, validation = [], []
    for record in run_folder.iterate_log(run.folder):
        for points, name in ((training, "loss"), (validation, "val_loss")):
            if name in record:
                points.append((record["step"], record[name]))
    return terminal.curve(training, validation)


def loop(run: Run, signals: Signals, report: Report) -> str:
    """Step until the run is done or its budget is; log, save and evaluate on the way. Returns how
    it ended, in a word or two.
    """
    config, progress = run.config, run.progress
    tokens_per_step = config.batch_size * config.block_size
    clock, logged, printed, line = Clock(run), progress.step, 0.0, {}
    signals.share()  # what came while it was set up
    if run.compiles and progress.step < run.total_steps:
        print("compiling ...", end=" ", flush=True)
        problem = run.compile()
        clock.stop()
        print(
            (
                f"failed; training goes on without it. {problem}"
                if problem
                else f"{clock.since_log:.1f} s"
            ),
            flush=True,
        )
        clock.since_log = 0.0
    gc.collect()
    gc.freeze()  # modules and compiled code stay: the collector took 0.25 s each time that it looked through them
    watched = run.total_steps - progress.step >= WARMUP + STEPS
    if config.profile and not watched:
        print(f"too few steps left for profile = True, which takes {WARMUP + STEPS}", flush=True)
    profiler = (
        Profiler(run.folder, run.device, run.profiled)
        if config.profile and watched and ranks.main
        else None
    )
    bar = tqdm(
        total=run.total_steps,
        initial=progress.step,
        unit="step",
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    )
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
                tqdm.write(
                    terminal.evaluation(
                        progress.step,
                        run.total_steps,
                        run.epoch,
                        line.get("loss"),
                        loss,
                        run.bits_per_byte(loss),
                        min(run.saver.best, loss),
                        speed,
                        run.cost,
                        left,
                    )
                )
                if samples:
                    tqdm.write(terminal.samples(samples))
                sys.stdout.flush()
                report.refresh()
            clock.start()
        signals.share()
        if progress.step >= run.total_steps or any(ranks.gather(bool(run.over_budget))):
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
            bar.set_postfix_str(
                f"loss {loss}, {speed:,.0f} tok/s, MFU "
                + (f"{line['mfu']:.1%}" if line["mfu"] else "n/a")
                + (f", cost {line['cost']:.2f}" if line["cost"] else "")
            )
            if bar.disable and time.monotonic() > printed + 20:
                printed = time.monotonic()
                left = duration((run.total_steps - progress.step) * tokens_per_step / speed)
                print(
                    f"step {progress.step:,} of {run.total_steps:,}: loss {loss}, {speed:,.0f}"
                    f" tokens/s, {left} left",
                    flush=True,
                )
    bar.close()
    return (
        "finished"
        if progress.step >= run.total_steps
        else f"stopped by {run.over_budget or 'the budget'}; raise it to go on"
    )


def generate_command(run: Run) -> str:
    """The command that generates from a run."""
    return f"python generate.py --checkpoint {run.folder} --prompt TEXT"


def main(argv: list[str]) -> None:
    """The command line's work, with errors as sentences."""
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    try:
        ranks.join()
        train(settings.load(argv))
        ranks.gather(0)  # none leaves while another waits for its numbers
    except (ConfigError, DataError, TokenizerError, CheckpointError, DeviceError) as error:
        ranks.say_once(f"train.py: {error}")
        sys.exit(2)
    except (RunError, OSError) as error:
        ranks.say_once(f"\ntrain.py: {error}")
        sys.exit(1)
    except ranks.Lost as error:
        ranks.say_once(
            f"train.py: another process of the run ended, or the connection to it failed: {error}"
        )
        sys.exit(1)
    except Exception as error:
        short = out_of_memory(error)
        if ranks.alone and not short:
            raise
        message = (
            "train.py: out of memory: weights, optimizer and data take too much of it. What takes"
            " less: n_layer, n_embd, data_location = mmap"
        )
        ranks.say_once(message if short else traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
        ranks.end(0)
    except SystemExit as end:
        ranks.end(end.code)
        raise
