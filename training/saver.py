"""Saves of a run: a copy of its state, which one thread writes to the disk and another uploads.

Training waits for the copy, and for the write of the save before; for an upload only at the end.
What a step folder holds is in formats/run_folder.py, what a mirror holds in formats/mirror.py.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import torch

import hardware
from formats import files, run_folder, run_log
from formats.address import AddressError, recorded
from formats.mirror import Mirror, address_of
from formats.run_folder import CheckpointError, tensors_in
from training import distributed, shard, terminal
from training.optimizer import parameter_names, reserve_state
from training.setup import Run

UPLOADING_S = 20 * 60  # that the end of a run waits for an upload,
FAILING_S = 60  # and for a mirror that fails then
PAUSE_S = 2  # between its tries


class Saver:
    """Saves a run, one step at a time. A save that fails is reported, and training goes on.

    saved_step: the last step that is on the disk whole; 0 if there is none. best: the validation
    loss in best.json; infinite if there is none.
    """

    def __init__(self, run: Run):
        self.run = run
        self.saved_step = run.state.progress.step
        self.best = run.best["val_loss"] if run.best else math.inf
        self.buffers = Buffers()
        self.writer = ThreadPoolExecutor(1)
        self.writing = None  # the newest job of the writer
        self.mirror = None
        if run.config.mirror and distributed.is_main:
            self.mirror = Mirror(address_of(run.config.mirror, run.folder))
        self.uploader = None  # the thread of the newest upload
        self.one_upload = threading.Lock()

    def begin(self) -> None:
        """Make ready what earlier starts left, and reserve the memory for the copy of a save."""
        run = self.run
        run_folder.set_aside(run.folder, run.state.progress.step)
        if run.best:  # a crash may have come between a save and its evaluation's mark
            self._write_best(run.best["step"], run.best["val_loss"])
        else:  # the user may have gone back to an earlier step
            (run.folder / "best.json").unlink(missing_ok=True)
        model, optimizer = run.state.model, run.state.optimizer
        with contextlib.suppress(RuntimeError, MemoryError):  # the first step will say so
            reserve_state(optimizer)
        # Not in the writer's thread: libgomp would give it a pool of its own, and with more threads
        # than cores it no longer lets the model's threads spin. Small models took twice the time.
        with contextlib.suppress(RuntimeError, MemoryError):  # the save itself will say so
            self.buffers.reserve(tensors_in([model.state_dict(), optimizer.state_dict()]))
        self._upload()  # a kill may have come before the last save was there

    @property
    def busy(self) -> bool:
        return self.writing is not None and not self.writing.done()

    def wait(self) -> None:
        """Until what was begun is written."""
        if self.writing:
            self.writing.result()

    def save(self) -> None:
        """Copy the state of this step, and have it written.

        Where the model is sharded, every process has to call it, as its tensors are gathered from
        all of them. The first process alone writes.
        """
        run = self.run
        run.schedule.mark_saved()
        model = run.state.model.state_dict()
        optimizer = {
            "optimizer": run.state.optimizer.state_dict(),
            "names": parameter_names(run.state.model, run.state.optimizer),
            "scaler": run.state.scaler.state_dict(),
        }
        if not distributed.is_main:
            shard.gather_to_main(model, optimizer)
            return
        self.wait()
        try:
            self.buffers.reserve(tensors_in([model, optimizer]))
        except (RuntimeError, MemoryError) as error:
            self._report_failure(run.state.progress.step, error)
            shard.gather_to_main(model, optimizer)  # the other processes are at it
            return
        model, optimizer = self.buffers.copy([model, optimizer])
        hardware.synchronize(run.device.torch)
        self.writing = self.writer.submit(self._write, self._describe(), model, optimizer)

    def _describe(self):
        """What state.json says of this step."""
        run = self.run
        run.state.progress.sums = run.trainer.counts.tolist()
        run.state.progress.running_s = run.clock.running_s
        return {
            "step": run.state.progress.step,
            "tokens": run.tokens,
            "epoch": run.epoch,
            "best_val_loss": None if self.best == math.inf else self.best,
            "seed": run.config.seed,
            "progress": asdict(run.state.progress),
            "model": asdict(run.state.model.config),
            "data": run.data.meta.identity(),
            "settings": recorded(asdict(run.config)),
            "versions": run.versions(),
        }

    def save_now(self) -> bool:
        """Have this step on the disk before returning; False if that failed."""
        self.wait()
        step = self.run.state.progress.step
        missing = distributed.is_main and self.saved_step < step
        if self.run.trainer.sharded:  # then all processes take part
            (missing,) = distributed.all_reduce_max(missing)
        if missing:
            self.save()
            self.wait()
        return not distributed.is_main or self.saved_step == step

    def mark_best(self, val_loss: float) -> None:
        """Have best.json name this step, once it is written, if its loss is the lowest so far."""
        if val_loss < self.best and distributed.is_main:
            step = self.run.state.progress.step
            self.writing = self.writer.submit(self._mark_best, step, val_loss)

    def finish(self) -> None:
        """Wait until all is written, and uploaded: while that goes on, but not for ever."""
        self.wait()
        if not self.mirror:
            return
        self._upload(patience_s=FAILING_S)
        if self.uploader.is_alive():
            self.uploader.join(1)
        if self.uploader.is_alive():
            print(f"uploading to {self.mirror.address}; Ctrl-C leaves it", flush=True)
            self.uploader.join(UPLOADING_S)
        if self.uploader.is_alive():
            self._report_mirror("it takes too long")

    # -- the thread that writes --------------------------------------------------------------------

    def _write(self, state, model, optimizer):
        run, step = self.run, state["step"]
        try:
            run_folder.save(run.folder, state, model, optimizer, run.data.tokenizer.to_json())
        except Exception as error:  # OSError, and whatever torch.save makes of one
            self._report_failure(step, error)
            return
        self.saved_step = step
        uploading = self.mirror.uploading if self.mirror else None
        with contextlib.suppress(OSError):  # the next save rotates again
            run_folder.rotate(run.folder, run.config.keep_last, spare=uploading)
            run_log.append(run.folder, {"step": step, "event": "save"})
        self._upload()

    def _mark_best(self, step, val_loss):
        if self.saved_step == step:
            with contextlib.suppress(OSError):
                self._write_best(step, val_loss)
                self.best = val_loss
            self._upload()

    def _write_best(self, step, val_loss):
        files.write_json(self.run.folder / "best.json", {"step": step, "val_loss": val_loss})

    def _report_failure(self, step, error):
        last = "there is no checkpoint yet"
        if self.saved_step:
            last = f"the last checkpoint is step {self.saved_step:,}"
        terminal.warn(
            f"step {step:,} could not be saved in {self.run.folder}: {files.in_words(error)}."
            f" Training goes on; {last}"
        )

    # -- the threads that upload -------------------------------------------------------------------

    def _upload(self, patience_s=0):
        """Have a thread update the mirror. patience_s: how long to try if it fails."""
        if self.mirror:
            # A daemon: Ctrl-C at the end leaves an upload.
            self.uploader = threading.Thread(target=self._update, args=[patience_s], daemon=True)
            try:
                self.uploader.start()
            except RuntimeError as error:  # no memory for another thread
                self._report_mirror(error)

    def _update(self, patience_s):
        with self.one_upload:
            if threading.current_thread() is not self.uploader:
                return  # a later one waits, and brings what this one would
            problem = self._try_to_update()
            deadline = time.monotonic() + patience_s
            while problem and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
                problem = self._try_to_update()
        if problem:
            self._report_mirror(problem)

    def _try_to_update(self):
        """What is wrong with the mirror; None once it is up to date."""
        try:
            self.mirror.update(self.run.folder, self.run.config.keep_last)
        except (AddressError, CheckpointError, OSError) as error:
            return files.in_words(error)
        return None

    def _report_mirror(self, problem):
        terminal.warn(
            f"mirror {self.mirror.address} is not up to date: {problem}. {self.run.folder} is;"
            " the next save, or the same command, uploads what is missing"
        )


class Buffers:
    """Memory on the CPU for a copy of the state, kept from one save to the next.

    To touch new memory takes longer than a copy. Pinned for what is on a GPU, which copies into
    that several times faster. A step changes the state in place, so each tensor keeps its buffer,
    and tensors that share memory share it in the copy.
    """

    def __init__(self):
        self.kept = {}  # {a tensor's memory: its buffer}

    def reserve(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have a buffer for each of these. Raises RuntimeError or MemoryError."""
        for t in tensors:
            if _memory(t) not in self.kept:
                self.kept[_memory(t)] = _new_buffer(t)

    def copy(self, value):
        """A copy of tensors in nested dicts, lists and tuples, for which there are buffers.

        From a GPU it is only begun.
        """
        if isinstance(value, dict):
            return {k: self.copy(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.copy, value))
        if not isinstance(value, torch.Tensor):
            return value
        full = shard.full_tensor(value)
        return self.kept[_memory(value)].copy_(full, non_blocking=full.is_cuda)


def _memory(tensor):
    return tensor.device, shard.local_shard(tensor).data_ptr(), tensor.shape, tensor.dtype


def _new_buffer(tensor):
    """Memory for a copy of `tensor` on the CPU, touched."""
    empty = {"size": tensor.shape, "dtype": tensor.dtype}
    try:
        return torch.empty(**empty, pin_memory=tensor.device.type == "cuda").zero_()
    except RuntimeError:  # no page-locked memory to be had
        return torch.zeros(**empty)
