"""Saves checkpoints in a background thread: write, flush, rename, rotate, upload.

Training waits only for the copy of its state, and for the previous save and its upload if they are
not done yet. The last save does not use the thread, where an upload may take long; a lock keeps the
two from changing the run's folder at once. formats/run_folder.py knows step folders,
formats/mirror.py mirrors.
"""

import contextlib
import io
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from formats import files, run_folder
from formats.address import AddressError
from formats.mirror import Mirror
from formats.run_folder import CheckpointError
from training import RunError, distributed, warn

LAST_UPLOAD_S = 120  # seconds that the end of a run waits for its mirror
LAST_SAVE_S = 120  # seconds for which the last save is tried, as a network disk may come back
PAUSE_S = 2  # seconds between tries to upload, and to save the last step


class Saver:
    """Saves one step at a time. If a save fails, this is reported, and training continues.

    Only the first process of a run saves; the methods do nothing in the others.

    saved_step: the last complete step on disk; 0 if there is none. val_losses: {step: validation
    loss} of all evaluations before this start, and since then of those that were the best so far.
    best_step, best: the step on disk with the lowest of these losses, and that loss, as in
    best.json; None if there is none.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        tokenizer_json: str,
        mirror: Mirror | None,
        saved_step: int,
        val_losses: dict[int, float],
    ):
        self.folder, self.keep_last, self.tokenizer_json = folder, keep_last, tokenizer_json
        self.mirror, self.saved_step, self.val_losses = mirror, saved_step, val_losses
        self.best_step = self.best = None  # until begin()
        self.disk = threading.Lock()  # held while writing or deleting in the folder
        self.thread = ThreadPoolExecutor(1)
        self.writing = None  # the thread's newest write
        self.jobs = []  # writes and follow-ups whose results have not been checked
        self.failure, self.failed_step = "", None  # why the last save failed, and of which step

    @property
    def busy(self) -> bool:
        """True if the thread has work. Raises the error of a failed job; a full disk fails none."""
        while self.jobs and self.jobs[0].done():
            self.jobs.pop(0).result()
        return bool(self.jobs)

    @distributed.on_main
    def clean_up(self) -> None:
        """Leave of earlier starts what this one needs: keep_last may be lower now."""
        run_folder.set_aside(self.folder, self.saved_step)
        self._tidy()  # the best may be outdated after a crash, or if the user went back

    @distributed.on_main
    def begin(self) -> None:
        """Clean up after earlier starts, and upload what they could not."""
        self.clean_up()
        torch.save({}, io.BytesIO())  # imports now what pip may have replaced by the first save
        # Also starts the thread now, as there may be no memory for it later.
        self._start(self._follow_up)

    @distributed.on_main
    def save(self, step: int, snapshot: Callable) -> None:
        """Copy the state of this step, and start writing it. snapshot: Run.snapshot."""
        self.wait()
        copy = self._copy(step, snapshot)
        if copy:
            self.writing = self._start(self._write, *copy)
            self._start(self._follow_up)

    def _start(self, work, *arguments):
        job = self.thread.submit(work, *arguments)
        self.jobs.append(job)
        return job

    def _copy(self, step, snapshot):
        try:
            return copy_to_ram(snapshot())
        except (RuntimeError, MemoryError) as error:
            self._report_failure(step, error)
            return None

    @distributed.on_main
    def mark_best(self, step: int, val_loss: float) -> None:
        """If this step's loss is the lowest so far, name it in best.json once it is written."""
        if val_loss < (math.inf if self.best is None else self.best):
            self.val_losses = self.val_losses | {step: val_loss}
            self._start(self._follow_up)

    def wait(self) -> None:
        """Wait until all jobs are done, uploads included."""
        while self.jobs:
            self.jobs.pop(0).result()

    @distributed.on_main
    def finish(self, step: int, snapshot: Callable) -> None:
        """Make sure that this step and best.json are on disk. Raises RunError if that fails.

        Does not wait for uploads. snapshot: as in save(); called if the step is not saved yet.
        """
        if self.writing:
            self.writing.result()
        if self.saved_step < step:
            copy = self._copy(step, snapshot)
            if copy:
                self._write_last(step, copy)
        self._mark_best()
        if self.saved_step < step:
            raise RunError(
                f"step {step:,} could not be saved in {self.folder}: {self.failure}."
                f" {self.last_checkpoint()}. Fix that, and start the same command again"
            )

    @distributed.on_main
    def close(self) -> None:
        """Finish all work on this disk, and wait up to LAST_UPLOAD_S for the mirror.

        Ctrl-C ends the wait.
        """
        last = self.thread.submit(self._follow_up, time.monotonic() + LAST_UPLOAD_S)
        if self.mirror is None:
            last.result()
            return
        print(f"uploading to {self.mirror.address}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            last.result(LAST_UPLOAD_S)
        except TimeoutError:
            self._mark_best()
            self._report_mirror("the upload timed out")
        except KeyboardInterrupt:
            self._mark_best()
            self._report_mirror("the upload was interrupted")
            raise

    def _write_last(self, step, copy):
        """Write the last step, with tries for LAST_SAVE_S."""
        deadline = time.monotonic() + LAST_SAVE_S
        self._write(*copy)
        if self.saved_step < step:
            warn(f"trying for {LAST_SAVE_S} s to save the last step; make room, or mount the disk")
        while self.saved_step < step and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
            self._write(*copy)

    def last_checkpoint(self) -> str:
        """Where the last good checkpoint is, in a sentence."""
        if not self.saved_step:
            return "There is no checkpoint yet"
        return f"The last good checkpoint is {self.folder / run_folder.step_name(self.saved_step)}"

    # -- in the thread -----------------------------------------------------------------------------

    def _write(self, description, model, optimizer):
        step = description["step"]
        with contextlib.suppress(OSError):  # the log must be on disk before the step
            files.sync(self.folder / run_folder.LOG)
        try:
            with self.disk:
                run_folder.save(self.folder, description, model, optimizer, self.tokenizer_json)
        except (OSError, MemoryError) as error:
            self._report_failure(step, error)
            return
        self.saved_step = step
        with contextlib.suppress(OSError):
            record = {"step": step, "event": "save"}
            files.patiently(run_folder.append_log, self.folder, record)

    def _follow_up(self, deadline=0.0):
        """Mark the best step, delete old ones, and upload, with retries until the deadline."""
        self._tidy()
        while self.mirror:
            try:
                self.mirror.update(self.folder)
                return
            except (AddressError, CheckpointError, OSError) as error:
                problem = files.error_message(error)
            if time.monotonic() >= deadline:
                self._report_mirror(problem)
                return
            time.sleep(PAUSE_S)

    def _tidy(self):
        """Mark the best step, and delete old ones."""
        self._mark_best()
        with self.disk, contextlib.suppress(OSError):  # the next save rotates again
            run_folder.rotate(self.folder, self.keep_last, self.best_step)

    def _mark_best(self):
        """Update best.json to the best of the steps on disk."""
        with self.disk, contextlib.suppress(OSError):  # the next save marks it again
            there = {run_folder.step_of(folder) for folder in run_folder.steps(self.folder)}
            losses = {step: loss for step, loss in self.val_losses.items() if step in there}
            self.best_step = min(losses, key=losses.get, default=None)
            self.best = losses.get(self.best_step)
            run_folder.write_best(self.folder, self.best_step, self.best)

    def _report_failure(self, step, error):
        self.failure = files.error_message(error)
        if step != self.failed_step:
            warn(
                f"step {step:,} could not be saved in {self.folder}: {self.failure}."
                f" The run tries again later. {self.last_checkpoint()}"
            )
        self.failed_step = step

    def _report_mirror(self, problem):
        warn(
            f"mirror {self.mirror.address} is not up to date: {problem}. The local copy in"
            f" {self.folder} is complete; the next save, or the same command, uploads what is"
            " missing"
        )


def copy_to_ram(values):
    """Copy nested dicts, lists and tuples, with their tensors, to RAM.

    Tensors that share memory share it in the copy too.
    """
    copies = {}

    def copied(tensor):
        key = (tensor.device, run_folder.place_of(tensor), tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.to("cpu", copy=True)
        return copies[key]

    return tree_map_only(torch.Tensor, copied, values)
