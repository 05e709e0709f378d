"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py config/gpt2_small.py      # on 8 GPUs

However a run ends, the same command continues it, and so does python train.py checkpoints/RUN.
training/setup.py makes the parts of a run; here is what happens with them, in order. All settings:
config/__init__.py, or --help.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import contextlib
import gc
import signal
import sys
from pathlib import Path

import config as settings
import hardware
from config import Config, ConfigError
from formats import files, run_folder
from formats.address import AddressError
from formats.data_folder import DataError
from formats.run_folder import CheckpointError
from hardware import DeviceError
from tokenizer_bpe import TokenizerError
from training import RunError, distributed
from training.distributed import StopFlag, locked
from training.plan import banner, check_disk, plan
from training.profiling import PROFILED_STEPS, Profiler
from training.recorder import Recorder, answer_prompts, continue_command, generate_command
from training.run import Run
from training.schedule import LIMITS
from training.setup import build

# What a user can mend; the exit status is 2.
MISTAKES = (
    AddressError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    TokenizerError,
)


def train(config: Config) -> int:
    """A whole run, from its settings to the last checkpoint. Returns the exit status."""
    check_batch(config)
    run_folder.check_own(Path(config.checkpoint_dir))
    if config.dry_run or not distributed.is_main:
        return run_to_its_end(build(config))
    folder = Path(config.checkpoint_dir)
    with locked(folder):  # before anything in it is read
        run_folder.delete_partial(folder)  # a kill leaves up to a whole checkpoint
        return run_to_its_end(build(config))


def run_to_its_end(run: Run) -> int:
    """From the step where a run is to its last one, or to a signal. Its state is on disk then."""
    print(banner(run))
    if run.schedule.done and not run.schedule.evaluation_due:
        print(
            f"already finished, at step {run.step:,}. To train longer:\n  {continue_command(run)}"
            f" --max_steps={2 * run.step}\nto generate:\n  {generate_command(run)}"
        )
        if distributed.is_main and not run.config.dry_run:
            run.saver.begin()  # a crash may have come between the last save and what follows it
            run.saver.close()
        return 0
    if run.config.dry_run:
        for part in plan(run):
            print(part)
        return 0
    if distributed.is_main:
        check_disk(run)
    recorder = Recorder(run)
    try:
        if distributed.is_main:
            recorder.begin()
            run.saver.begin()
        prepare(run, recorder)
        stop = StopFlag()  # until here there is nothing to save: a signal ends the process
        try:
            ending, status = loop(run, stop, recorder)
        except (RuntimeError, MemoryError) as error:
            ending, status = why_interrupted(error), 1
            if not ending:
                raise
        if distributed.is_main:
            run.saver.finish(run.step, run.snapshot)
            recorder.interrupted(ending) if status else recorder.summary(ending)
        return status
    finally:
        recorder.close()
        if distributed.is_main:
            run.saver.close()


def prepare(run: Run, recorder: Recorder) -> None:
    """Find the micro-batch that fits the memory, and compile the model with it."""
    if run.schedule.done:
        return
    run.clock.start()
    if run.compiles:
        print("compiling ...", end=" ", flush=True)
    wanted = run.trainer.micro_batch
    problem = run.trainer.prepare(run.compiles)
    seconds = run.clock.since_log()
    if problem:
        print(f"{problem}; training continues without it")
    elif run.compiles:
        print(f"{seconds:.1f} s")
    if run.trainer.micro_batch < wanted:
        recorder.halved(wanted)
    gc.collect()
    gc.freeze()  # modules and compiled code stay: looking through them took the collector 0.25 s


def loop(run: Run, stop: StopFlag, recorder: Recorder) -> tuple[str, int]:
    """Step until the run is done, its budget is, or a signal comes.

    Returns how it ended, in a word or two, and the exit status.
    """
    trainer, schedule, clock, saver = run.trainer, run.schedule, run.clock, run.saver
    profiler = None
    if run.config.profile and distributed.is_main:
        if schedule.steps_left >= PROFILED_STEPS:
            profiler = Profiler(run.folder, run.device.torch, recorder.profile)
        else:
            print(f"no profile: it takes {PROFILED_STEPS} steps, {schedule.steps_left} are left")
    clock.start()
    while True:
        # What one process finds out takes effect in all of them, at this step.
        save_due = distributed.is_main and schedule.save_due(saver.busy)
        signum, limit, save_due = distributed.all_reduce_max(
            stop.signum, clock.exceeded(), save_due
        )
        if save_due:
            with clock.paused():
                schedule.mark_saved()
                if distributed.is_main:
                    saver.save(run.snapshot())
        if signum:
            return signal.Signals(int(signum)).name, 128 + int(signum)
        if schedule.evaluation_due:
            with clock.paused():
                validate(run, stop, recorder)
            continue
        if schedule.done:
            return "finished", 0
        if limit:
            name = LIMITS[int(limit)]
            return f"stopped at {name} = {getattr(run.config, name)}, which a restart may raise", 0
        trainer.step()
        recorder.bar.update()
        if profiler:
            profiler.step()
        if schedule.check_due:
            trainer.check_finite()
        if schedule.log_due:
            recorder.step(clock.since_log())


def validate(run: Run, stop: StopFlag, recorder: Recorder) -> None:
    """The validation loss and the answers to sample_prompts; the step may be the best so far.

    A signal cuts it short: the evaluation comes again when the run continues.
    """
    loss = run.trainer.evaluate(stop.set_anywhere)
    if loss is None:
        return
    run.schedule.mark_evaluated()
    if not distributed.is_main:
        return
    prompts, seed, cast = run.config.sample_prompts, run.config.seed, run.trainer.cast
    answers = answer_prompts(run.state.model, run.data.tokenizer, prompts, seed, cast)
    recorder.evaluation(loss, answers)
    run.saver.mark_best(run.step, loss)


def why_interrupted(error: Exception) -> str | None:
    """Why the next step did not come about; None for an error after which nothing is saved."""
    if hardware.out_of_memory(error):
        return "memory ran out"
    if distributed.connection_lost(error):
        return "another process of the run has ended"
    return None


# -- the command -----------------------------------------------------------------------------------


def check_batch(config: Config) -> None:
    """Raises ConfigError where the processes cannot share a batch."""
    world_size = distributed.world_size
    if config.batch_size % world_size:
        next_larger = -(-config.batch_size // world_size) * world_size
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared by {world_size} processes; the "
            f"next larger that can is {next_larger}"
        )


def main() -> int:
    """The command, with errors as sentences. Returns the exit status."""
    return startup.run("train.py", start, MISTAKES, explain, distributed.print_error)


def start(argv: list[str]) -> int:
    """Join the other processes, and train. Returns the exit status."""
    sys.stdout, sys.stderr = startup.Output(sys.stdout), startup.Output(sys.stderr)
    distributed.init()
    status = train(settings.load(argv))
    with contextlib.suppress(RuntimeError):  # another process has ended already
        distributed.gather(0)  # torchrun ends all processes soon after the first
    return status


def explain(error: BaseException) -> str | None:
    """The sentence for a failure that is no mistake, if it has one."""
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, OSError):
        return files.error_message(error)
    if hardware.out_of_memory(error):
        return (
            "out of memory: weights, optimizer and data take too much of it. Try a smaller n_layer"
            " or n_embd"
        )
    if distributed.connection_lost(error):
        return f"the processes of this run cannot work together, or one has ended: {error}"
    return None


if __name__ == "__main__":
    distributed.exit_process(main())
