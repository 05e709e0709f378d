"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py config/gpt2_small.py      # on 8 GPUs

However a run ends, the same command continues it. training/setup.py makes the parts of a run; here
is what happens with them, in order. All settings: config/__init__.py, or --help.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import gc
import sys
import traceback
from pathlib import Path

import config as settings
from config import Config, ConfigError
from formats import files, run_folder
from formats.address import AddressError
from formats.data_folder import DataError
from formats.run_folder import CheckpointError
from hardware import DeviceError, out_of_memory, synchronize
from tokenizer_bpe import TokenizerError
from training import RunError, distributed, terminal
from training.banner import banner
from training.lock import Lock
from training.memory import OutOfMemory
from training.plan import check_disk, plan
from training.profiling import STEPS, WARMUP, Profiler
from training.recorder import Recorder, generate_command
from training.samples import answer_prompts
from training.saver import Saver
from training.setup import Run, build
from training.signals import Signals, Stop, leave

# What a user can mend; the exit status is 2.
MISTAKES = (
    AddressError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    TokenizerError,
)


def train(config: Config) -> None:
    """A whole run, from its settings to the last checkpoint."""
    check_processes(config)
    signals, folder, lock = Signals(), Path(config.checkpoint_dir), None
    try:
        if distributed.is_main and not config.dry_run:
            lock = Lock(folder)  # before anything in it is read
            run_folder.delete_partial(folder)  # a kill leaves up to a whole checkpoint
        run = build(config)
        print(banner(run), flush=True)
        if config.dry_run:
            for part in plan(run):
                print(part, flush=True)
            signals.raise_if_any()
            return
        if run.schedule.done and not run.schedule.evaluation_due:
            print(
                f"finished already, at step {run.state.progress.step:,}. To train longer raise "
                f"epochs or max_steps. To generate:\n  {generate_command(run)}"
            )
            Saver(run).finish()
            return
        if distributed.is_main and not run.schedule.done:
            check_disk(run)
        run_to_the_end(run, signals)
    except Stop as stop:
        leave(stop.signum, stop.message or what_is_saved(folder))
    finally:
        signals.hold()  # there is nothing left to end
        if lock:
            lock.release()


def run_to_the_end(run: Run, signals: Signals) -> None:
    """From the step where a run is to its last one, or to a signal. Its state is on disk then."""
    recorder, saver = Recorder(run), Saver(run)
    try:
        if distributed.is_main:
            saver.begin()
            recorder.begin()
        outcome = loop(run, signals, recorder, saver)
        with signals.held():
            if not saver.save_now():
                raise RunError(not_saved(run, saver))
            if distributed.is_main:
                recorder.summary(outcome, saver.best)
    except (Stop, RuntimeError) as error:
        stopped, no_memory = isinstance(error, Stop), isinstance(error, OutOfMemory)
        if not (stopped or no_memory or distributed.connection_lost(error)):
            raise
        signals.hold()  # only a second Ctrl-C stops the save that follows
        if run.state.progress.step:
            message = save_after_interruption(run, saver, stopped)
            if stopped:
                error.message = message
            else:
                why = "memory ran out" if no_memory else "a process of the run has ended"
                print(f"\n{why}; {message}", flush=True)
        raise
    finally:
        recorder.close()
        signals.together = False  # Ctrl-C leaves the last upload
        saver.finish()


def loop(run: Run, signals: Signals, recorder: Recorder, saver: Saver) -> str:
    """Step until the run is done or its budget is. Returns how it ended, in a word or two."""
    trainer, schedule, clock = run.trainer, run.schedule, run.clock
    signals.raise_if_any()  # what came while it was set up
    clock.start()
    if run.compiles and not schedule.done:
        recorder.compiling()
        micro_batch = run.micro_batch.size
        problem = trainer.compile(run.compiles)
        recorder.compiled(clock.lap(), problem)
        if run.micro_batch.size < micro_batch:
            recorder.halved()
    recorder.open_bar()
    gc.collect()
    gc.freeze()  # modules and compiled code stay: looking through them took the collector 0.25 s
    profiler = make_profiler(run, recorder)
    while True:
        # What one process finds out takes effect in all of them, at this step.
        limit = clock.used_up()
        save_due = distributed.is_main and schedule.save_due(saver.busy)
        stop, over_budget, save_due = distributed.all_reduce_max(
            distributed.stop_flag, bool(limit), save_due
        )
        if stop:
            raise Stop(int(stop))
        if save_due:  # first: an evaluation may run out of memory
            with clock.paused(), signals.held():
                saver.save()
        if schedule.evaluation_due:
            with clock.paused():
                validate(run, signals, recorder, saver)
        if schedule.done:
            return "finished"
        if over_budget:
            return f"stopped by {limit or 'the budget'}; raise it to go on"
        loss, halved = trainer.gradients()
        with signals.held():  # weights and counters change together
            trainer.update(loss)
        recorder.bar.update()
        if halved:
            recorder.halved()
        if profiler:
            profiler.step()
        if schedule.check_due:
            check_numbers(run, recorder, saver)
        if schedule.log_due:
            with signals.held():
                recorder.step(clock.lap())


def validate(run: Run, signals: Signals, recorder: Recorder, saver: Saver) -> None:
    """The validation loss and the answers to sample_prompts; the step may be the best so far."""
    loss, halved = run.trainer.evaluate(signals.raise_if_any)
    if halved:
        recorder.halved()
    run.schedule.evaluated = run.state.progress.step
    prompts, seed, cast = run.config.sample_prompts, run.config.seed, run.trainer.cast
    answers = answer_prompts(run.state.model, run.data.tokenizer, prompts, seed, cast)
    best = min(saver.best, loss)  # before this one may become it
    saver.mark_best(loss)
    recorder.evaluation(loss, best, answers)


def check_numbers(run: Run, recorder: Recorder, saver: Saver) -> None:
    """Raises RunError after max_bad_steps steps in a row whose loss or gradients are NaN."""
    problem = run.trainer.bad_numbers()
    if problem:
        recorder.record({"event": "diverged"})
        saver.wait()
        raise RunError(f"{problem}. {last_checkpoint(run, saver)}")


def make_profiler(run: Run, recorder: Recorder) -> Profiler | None:
    """What watches a few steps, if the settings ask for it and enough steps are left."""
    if not run.config.profile or not distributed.is_main:
        return None
    if run.schedule.steps_left < WARMUP + STEPS:
        print(f"too few steps left for profile = True, which takes {WARMUP + STEPS}", flush=True)
        return None
    return Profiler(run.folder, run.device.torch, recorder.profile)


# -- how a run ends --------------------------------------------------------------------------------


def save_after_interruption(run: Run, saver: Saver, stopped: bool) -> str:
    """Save what is there after a signal, or else an error. Returns what came of it."""
    saver.wait()
    saved = distributed.is_main and saver.saved_step == run.state.progress.step
    # The GPU's queue may hold a sum that will never come, as a process has left the step; and where
    # the model is sharded a part of the state has gone with it.
    reachable = stopped or (not run.trainer.sharded and synchronize(run.device.torch, 10))
    step = f"step {run.state.progress.step:,}"
    if saved or (reachable and saver.save_now()):
        return f"{step} is saved in {run.folder}; the same command continues"
    return f"{step} could not be saved. {last_checkpoint(run, saver)}"


def last_checkpoint(run: Run, saver: Saver) -> str:
    """Where the last good checkpoint is, in a sentence."""
    if not saver.saved_step:
        return "There is no checkpoint yet"
    return f"The last good checkpoint is {run.folder / run_folder.step_name(saver.saved_step)}"


def not_saved(run: Run, saver: Saver) -> str:
    """What to say when the last step of a run is not on the disk."""
    elsewhere = "" if saver.saved_step else " or choose another checkpoint_dir"  # begins a new run
    return (
        f"step {run.state.progress.step:,} could not be saved in {run.folder}. "
        f"{last_checkpoint(run, saver)}. Make room{elsewhere}, and start the same command again"
    )


def what_is_saved(folder: Path) -> str:
    """What to say of a run that was stopped before its first step or after its last."""
    saved = run_folder.steps(folder)
    if not saved:
        return "no step was done yet"
    return f"step {run_folder.step_of(saved[-1]):,} is saved in {folder}"


# -- the command -----------------------------------------------------------------------------------


def check_processes(config: Config) -> None:
    """Raises ConfigError where the settings do not suit the number of processes."""
    world_size = distributed.world_size
    if config.batch_size % world_size:
        next_larger = -(-config.batch_size // world_size) * world_size
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared by {world_size} processes; the "
            f"next larger that can is {next_larger}"
        )
    if config.dry_run and world_size > 1:
        raise ConfigError("dry_run = True plans for one process; start it without torchrun")


def main(argv: list[str]) -> None:
    """The command line's work, with errors as sentences."""
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    sys.stdout, sys.stderr = terminal.Output(sys.stdout), terminal.Output(sys.stderr)
    try:
        distributed.init()
        train(settings.load(argv))
        distributed.gather(0)  # none leaves while another waits for its numbers
    except MISTAKES as error:
        fail(2, f"train.py: {error}")
    except RunError as error:
        fail(1, f"\ntrain.py: {error}")
    except OSError as error:
        fail(1, f"\ntrain.py: {files.in_words(error)}")
    except Exception as error:
        if out_of_memory(error):
            fail(
                1,
                "train.py: out of memory: weights, optimizer and data take too much of it. Try "
                "a smaller n_layer or n_embd, or data_location = mmap",
            )
        if distributed.connection_lost(error):
            fail(1, f"train.py: another process of the run ended, or cannot be reached: {error}")
        if distributed.world_size == 1:
            raise
        fail(1, traceback.format_exc())


def fail(status: int, message: str) -> None:
    """End with a message, which one process writes for all."""
    distributed.print_error(message)
    sys.exit(status)


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        status = end.code
    distributed.exit_process(status)
