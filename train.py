"""Train a GPT on a prepared data set.

    python train.py config/gpt2_small.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py config/gpt2_small.py      # on 8 GPUs

However a run ends, the same command continues it, and so does python train.py checkpoints/RUN.
Here is what a run does, in order, and one whole step of it; how its parts are made is in
training/setup.py. All settings: config/__init__.py, or --help.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports
else:
    startup.tune_environment()

import contextlib
import gc
import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from torch.profiler import record_function

import config as settings
import hardware
from config import Config, ConfigError
from formats import files, run_folder
from model import IGNORE
from training import distributed
from training.distributed import StopFlag, locked, signals_restored
from training.fit import fit_in_memory
from training.optimizer import clip_gradients, set_learning_rates, update_weights
from training.plan import banner, check_disk, plan
from training.profiling import open_profiler
from training.recorder import Recorder, continue_command, generate_command
from training.run import Run
from training.schedule import LIMITS
from training.setup import build
from training.step import evaluate, forward_backward, seed_random, unsaved_if_it_fails


@signals_restored()
def train(config: Config) -> int:
    """A whole run, from its settings to the last checkpoint. Returns the exit status."""
    check_batch(config)
    folder = Path(config.checkpoint_dir)
    run_folder.check_own(folder)
    writes = distributed.is_main and not config.dry_run
    with locked(folder) if writes else contextlib.nullcontext():
        run = build(config)  # with new weights, those of init_from, or of its last checkpoint
        print(banner(run))
        if run.finished:
            return already_finished(run)
        if config.dry_run:
            for part in plan(run):
                print(part)
            return 0
        run.saver.clean_up()
        check_disk(run)
        recorder = Recorder(run)
        recorder.begin()
        run.saver.begin()
        try:
            prepare(run, recorder)
            return run_to_its_end(run, recorder)
        finally:
            recorder.close()
            run.saver.close()
            gc.unfreeze()  # another run may follow in this process


def prepare(run: Run, recorder: Recorder) -> None:
    """Find the micro-batch that fits the memory, and compile the model with it."""
    run.clock.start()
    run.compiles = run.compiles and not run.schedule.done  # not for the last evaluation alone
    if run.compiles:
        print("compiling ...", end=" ", flush=True)
    wanted = run.micro_batch
    problem = fit_in_memory(run)
    seconds = run.clock.since_log()
    if problem:
        print(f"{problem}; training continues without it")
    elif run.compiles:
        print(f"{seconds:.1f} s")
    if run.micro_batch < wanted:
        run.micro_batch_limit = run.micro_batch
        recorder.halved(wanted)
    gc.collect()
    gc.freeze()  # modules and compiled code stay: looking through them took the collector 0.25 s


def run_to_its_end(run: Run, recorder: Recorder) -> int:
    """Train until the run is done, its budget is, or a signal comes; save. The exit status."""
    stop = StopFlag()  # until here there is nothing to save: a signal ends the process
    try:
        ending, status = loop(run, stop, recorder)
    except (RuntimeError, MemoryError) as error:
        ending, status = why_interrupted(error), 1
        if not ending:
            raise
        if not distributed.is_main:  # it prints nowhere, and the others have not seen the error
            distributed.print_error(f"process {distributed.rank}: {ending}")
    run.saver.finish(run.step, run.snapshot)
    if status:
        recorder.interrupted(ending)
    else:
        recorder.summary(ending)
    return status


def loop(run: Run, stop: StopFlag, recorder: Recorder) -> tuple[str, int]:
    """Step, save, evaluate and log. Returns how it ended, in words, and the exit status."""
    schedule, clock, saver = run.schedule, run.clock, run.saver
    profiler = open_profiler(run, recorder.profile)
    clock.start()
    while True:
        # What one process finds out takes effect in all of them, at this step.
        save_due = distributed.is_main and schedule.save_due(saver.busy)
        signum, limit, save_due = distributed.all_reduce_max(
            stop.signum, clock.exceeded(), save_due
        )
        if signum:
            return signal.Signals(int(signum)).name, 128 + int(signum)
        if save_due:  # before an evaluation too, as this step may be the best so far
            with clock.paused():
                schedule.mark_saved()
                saver.save(run.step, run.snapshot)
        if schedule.evaluation_due:
            with clock.paused():
                validate(run, stop, recorder)
            continue
        if schedule.done:
            return "finished", 0
        if limit:
            name = LIMITS[int(limit)]
            return f"stopped at {name} = {getattr(run.config, name)}, which a restart may raise", 0

        training_step(run)
        recorder.bar.update()
        if profiler:
            profiler.step()
        if schedule.check_due:
            run.check_finite()
        if schedule.log_due:
            recorder.step(clock.since_log())


def training_step(run: Run) -> None:
    """One optimizer step: the next batch, its gradients, and the update.

    Several processes each take their share of the sequences.
    """
    c, counters = run.config, run.counters

    with record_function("data"):
        first = counters.sequences + distributed.rank * run.local_batch
        x, y = run.data.train.batch(first, run.local_batch, c.seed)

    predictions = None  # every target counts
    if c.loss_on == "assistant":
        predictions = distributed.all_reduce_mean((y != IGNORE).sum().float())
    seed_random(c.seed, counters.step)
    loss = forward_backward(run.ddp, x, y, run.micro_batch, run.cast, run.scaler, predictions)
    loss = distributed.all_reduce_mean(loss)

    with unsaved_if_it_fails(counters.step + 1), record_function("optimizer"):
        multiplier = run.schedule.lr_multiplier
        set_learning_rates(run.optimizer, multiplier)
        norm = clip_gradients(run.model, run.optimizer, run.scaler, c.grad_clip)
        update_weights(run.optimizer, run.scaler, norm)  # not if the norm is NaN or infinite
        # A GradScaler skips steps until it has found its scale: these are not bad ones.
        deciding = loss if run.scaler.is_enabled() else norm
        run.loss_sums.add(loss, norm, good=deciding.isfinite())
        run.learning_rate = c.learning_rate * multiplier
        counters.step += 1
        counters.sequences += c.batch_size


def validate(run: Run, stop: StopFlag, recorder: Recorder) -> None:
    """The validation loss and the answers to sample_prompts; the step may be the best so far.

    A signal cuts it short: the evaluation comes again when the run continues.
    """
    loss = validation_loss(run, stop.set_anywhere)
    if loss is None:
        return
    run.schedule.mark_evaluated()
    recorder.evaluation(loss)
    run.saver.mark_best(run.step, loss)


def validation_loss(run: Run, interrupted: Callable[[], bool]) -> float | None:
    """The validation loss in nats per token; None once `interrupted` says so, asked on the way."""
    windows = run.config.eval_batches * run.config.batch_size
    rank, ranks = distributed.rank, distributed.world_size
    batches = run.data.val.evaluation(windows, run.micro_batch, rank, ranks)
    batches = itertools.takewhile(lambda _: not interrupted(), batches)
    total, count = evaluate(run.compiled, batches, run.cast)
    if interrupted():
        return None
    return sum(distributed.gather(float(total))) / sum(distributed.gather(float(count)))


def why_interrupted(error: Exception) -> str | None:
    """Why the loop ended, if this error leaves a step that can be saved; else None."""
    if hardware.out_of_memory(error):
        return "memory ran out"
    if distributed.connection_lost(error):
        return "another process of the run has ended"
    return None


def already_finished(run: Run) -> int:
    """Say what to do with a run that is at its end. Returns the exit status."""
    print(
        f"already finished, at step {run.step:,}. To train longer:\n  {continue_command(run)}"
        f" --max_steps={2 * run.step}\nto generate:\n  {generate_command(run)}"
    )
    if not run.config.dry_run:
        run.saver.begin()  # a crash may have come between the last save and what follows it
        run.saver.close()
    return 0


# -- the command -----------------------------------------------------------------------------------


def check_batch(config: Config) -> None:
    """Raises ConfigError if the processes cannot share a batch."""
    world_size = distributed.world_size
    if config.batch_size % world_size:
        next_larger = -(-config.batch_size // world_size) * world_size
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared by {world_size} processes; the "
            f"next larger that can is {next_larger}"
        )


def main() -> int:
    """The command, with errors as sentences. Returns the exit status."""
    return startup.run("train.py", start, explain, distributed.print_error)


def start(argv: list[str]) -> int:
    """Join the other processes, and train. Returns the exit status."""
    sys.stdout, sys.stderr = startup.Output(sys.stdout), startup.Output(sys.stderr)
    distributed.init()
    status = train(settings.load(argv))
    if status != 1:  # after an error the others wait elsewhere, until this process has ended
        with contextlib.suppress(RuntimeError):  # another process has ended already
            distributed.barrier()  # torchrun ends all processes soon after the first
    return status


def explain(error: BaseException) -> str | None:
    """The sentence for another error, if it has one."""
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
