"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py config/gpt2_small.py      # on 8 GPUs

However a run ends, the same command continues it. What a run consists of, training/setup.py
puts together; here is what happens with it, in order. All settings: config/__init__.py, or --help.
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
from formats.run_folder import CheckpointError
from hardware import DeviceError, catches_up, out_of_memory
from tokenizer_bpe import TokenizerError
from training import distributed, shard
from training.banner import banner
from training.dataset import DataError
from training.errors import RunError
from training.lock import Lock
from training.plan import plan
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
    writes = distributed.is_main and not config.dry_run
    try:
        if writes and config.mirror:
            folder.mkdir(parents=True, exist_ok=True)  # the run may come from there
        if writes and folder.is_dir():
            lock = Lock(folder)  # before anything in it is read
        run = build(config)  # writes nothing
        print(banner(run), flush=True)
        if config.dry_run:
            for part in plan(run):
                print(part, flush=True)
            signals.raise_if_received()
            return
        if run.schedule.done and not run.schedule.evaluation_due:
            print(
                f"finished already, at step {run.state.progress.step:,}. To train longer raise "
                f"epochs or max_steps. To generate:\n  {generate_command(folder)}"
            )
            Saver(run).finish()
            return
        if writes and not lock:
            lock = lock_new_folder(folder)
        run_to_the_end(run, signals)
    except Stop as stop:
        leave(stop.signum, what_is_saved(folder))
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
            saved = saver.save_now()
        if not distributed.is_main:
            return
    except (Stop, distributed.Lost) as interruption:
        signals.hold()  # only a second Ctrl-C stops the save that follows
        if run.state.progress.step:
            save_after_interruption(run, saver, interruption)
        raise
    finally:
        recorder.close()
        saver.finish()
    if not saved:
        raise RunError(not_saved(run, saver))
    recorder.summary(outcome, saver.best)


def loop(run: Run, signals: Signals, recorder: Recorder, saver: Saver) -> str:
    """Step until the run is done or its budget is. Returns how it ended, in a word or two."""
    trainer, schedule, clock = run.trainer, run.schedule, run.clock
    run.memory.on_halved = recorder.halved  # written down for the next start
    signals.raise_if_received()  # what came while it was set up
    clock.start()
    if run.compiles and not schedule.done:
        recorder.compiling()
        problem = trainer.compile(run.compiles)
        recorder.compiled(clock.lap(), problem)
    recorder.open_bar()
    gc.collect()
    gc.freeze()  # modules and compiled code stay: looking through them took the collector 0.25 s
    profiler = make_profiler(run, recorder)
    while True:
        if save_due(run, saver):  # first: an evaluation may run out of memory
            with clock.paused(), signals.held():
                saver.save()
        if schedule.evaluation_due:
            with clock.paused():
                validate(run, recorder, saver)
        signals.raise_if_received()  # every process, at the same step
        if schedule.done:
            return "finished"
        if limit := run.budget.exceeded():
            return f"stopped by {limit}; raise it to go on"
        loss = trainer.gradients()  # the micro-batch is halved where memory runs out
        with signals.held():  # weights and counters change together
            trainer.update(loss)
        recorder.tick()
        if profiler:
            profiler.step()
        if schedule.check_due:
            check_numbers(run, recorder, saver)
        if schedule.log_due:
            with signals.held():
                recorder.step(clock.lap())


def save_due(run: Run, saver: Saver) -> bool:
    """Whether to save now; what the first process says, where all take part in a save."""
    due = run.schedule.save_due(saver.busy)
    return bool(distributed.gather(due)[0]) if shard.wanted(run.config) else due


def validate(run: Run, recorder: Recorder, saver: Saver) -> None:
    """The validation loss and the answers to sample_prompts; the step may be the best so far."""
    loss = run.trainer.evaluate()
    run.schedule.mark_evaluated()
    c, cast = run.config, run.trainer.cast
    answers = answer_prompts(run.state.model, run.tokenizer, c.sample_prompts, c.seed, cast)
    best = min(saver.best, loss)  # before this one may become it
    saver.mark_best(loss)
    recorder.evaluation(loss, best, answers)


def check_numbers(run: Run, recorder: Recorder, saver: Saver) -> None:
    """Raises RunError after max_bad_steps steps in a row whose loss or gradients are NaN."""
    problem = run.trainer.bad_numbers()
    if problem:
        recorder.record({"event": "diverged"})
        saver.wait()
        last = "There is no checkpoint yet"
        if saver.saved_step:
            last = f"The last good checkpoint is {run.folder}/step_{saver.saved_step:08d}"
        raise RunError(f"{problem}. {last}")


def make_profiler(run: Run, recorder: Recorder) -> Profiler | None:
    """What watches a few steps, if the settings ask for it and enough steps are left."""
    if not run.config.profile:
        return None
    if run.schedule.steps_left < WARMUP + STEPS:
        print(f"too few steps left for profile = True, which takes {WARMUP + STEPS}", flush=True)
        return None
    return Profiler(run.folder, run.device, recorder.profile) if distributed.is_main else None


def save_after_interruption(run: Run, saver: Saver, interruption) -> None:
    """Save what is there after a signal (Stop) or the loss of a process; say what came of it."""
    step = f"step {run.state.progress.step:,}"
    stopped = isinstance(interruption, Stop)
    # The GPU's queue may hold a sum that will never come, with a process that has ended; and a part
    # of the state has gone with it where that is shared out.
    reachable = stopped or (not shard.wanted(run.config) and catches_up(run.device, 10))
    if reachable and saver.save_now():
        message = f"{step} is saved in {run.folder}; the same command continues"
    else:
        saver.wait()
        last = saver.saved_step
        message = f"{step} could not be saved; the last checkpoint is step {last:,}"
    saver.finish()
    if stopped:
        leave(interruption.signum, message)
    print(f"\na process of the run has ended; {message}", flush=True)


def what_is_saved(folder: Path) -> str:
    """What to say of a run that was stopped before its first step or after its last."""
    saved = run_folder.steps(folder)
    if not saved:
        return "no step was done yet"
    return f"step {run_folder.step_of(saved[-1]):,} is saved in {folder}"


def not_saved(run: Run, saver: Saver) -> str:
    """What to say when the last step of a run is not on the disk."""
    last = "there is no checkpoint yet"
    if saver.saved_step:
        last = f"the last checkpoint there is step {saver.saved_step:,}"
    return (
        f"step {run.state.progress.step:,} could not be saved in {run.folder}, {last}; make room "
        "or choose another checkpoint_dir, and start the same command again"
    )


def check_processes(config: Config) -> None:
    """Raises ConfigError where the settings do not suit the number of processes."""
    if config.batch_size % distributed.world_size:
        next_larger = -(-config.batch_size // distributed.world_size) * distributed.world_size
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared by {distributed.world_size} "
            f"processes; the next larger that can is {next_larger}"
        )
    if config.dry_run and distributed.world_size > 1:
        raise ConfigError("dry_run = True plans for one process; start it without torchrun")


def lock_new_folder(folder: Path) -> Lock:
    """Make the folder of a run and lock it. Raises RunError where another trainer was faster."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    if run_folder.steps(folder):
        lock.release()
        raise RunError(
            f"another trainer has just begun in {folder}; start the same command again to "
            "continue its run"
        )
    return lock


def main(argv: list[str]) -> None:
    """The command line's work, with errors as sentences."""
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows another
    try:
        distributed.init()
        train(settings.load(argv))
        distributed.gather(0)  # none leaves while another waits for its numbers
    except MISTAKES as error:
        distributed.say_once(f"train.py: {error}")
        sys.exit(2)
    except RunError as error:
        distributed.say_once(f"\ntrain.py: {error}")
        sys.exit(1)
    except OSError as error:
        distributed.say_once(f"\ntrain.py: {files.in_words(error)}")
        sys.exit(1)
    except distributed.Lost as error:
        distributed.say_once(
            f"train.py: another process of the run ended, or the connection to it failed: {error}"
        )
        sys.exit(1)
    except Exception as error:
        short = out_of_memory(error)
        if distributed.world_size == 1 and not short:
            raise
        message = (
            "train.py: out of memory: weights, optimizer and data take too much of it. What takes "
            "less: n_layer, n_embd, data_location = mmap"
        )
        distributed.say_once(message if short else traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
        startup.done()
        distributed.end(0)
    except SystemExit as end:
        startup.done()
        distributed.end(end.code)
        raise
