"""Saves from a thread, so that training waits for a copy of its state alone.

Knows when a save is under way and what became of it; the files are formats/run_folder.py's.
"""

import contextlib
import math
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

from formats import run_log
from formats.files import first_line, in_words, write_json
from formats.run_folder import rotate, save, tensors_in
from training import shard
from training.mirror import Uploader


class Saver:
    """Saves a copy of the state from a thread, one at a time.

    saved: the step last written whole. best: the validation loss in best.json. A save that fails is
    reported, and the run goes on. mirror: hears of each save.
    """

    def __init__(
        self,
        run: Path,
        keep_last: int,
        saved: int = 0,
        best: float = math.inf,
        mirror: Uploader | None = None,
    ):
        self.run, self.keep_last, self.saved, self.best = run, keep_last, saved, best
        self.thread, self.buffers = None, {}
        self.mirror = mirror or Uploader(None, run, keep_last)

    def reserve(self, tensors: list[torch.Tensor]) -> None:
        """Have memory for copies of these at hand: to touch new memory takes longer than a copy."""
        self._begin(self._reserve, tensors)

    def _begin(self, job, *args):
        """Run a job in the thread; False where there is no memory for one."""
        self.thread = threading.Thread(target=job, args=args)
        try:
            self.thread.start()
        except RuntimeError:
            self.thread = None
        return self.thread is not None

    def _reserve(self, tensors):
        # If memory is short, the save itself will say so.
        with contextlib.suppress(RuntimeError, MemoryError):
            self._take(tensors)

    def _take(self, tensors):
        held = Counter({kind: len(buffers) for kind, buffers in self.buffers.items()})
        for t in tensors:
            if not held[_kind(t)]:
                self.buffers.setdefault(_kind(t), []).append(_buffer(t))
            else:
                held[_kind(t)] -= 1

    def has_room(self, step: int, tensors: list[torch.Tensor]) -> bool:
        """Whether there is memory for copies of these; if not, says that `step` is not saved."""
        self.wait()
        try:
            self._take(tensors)
        except (RuntimeError, MemoryError) as error:
            self._failed(step, str(error).splitlines()[0])
            return False
        return True

    def save(self, state: dict, model: dict, optimizer: dict, tokenizer_json: str) -> None:
        """Copy the state and have it written, once the save before is."""
        self.wait()
        free = {kind: list(buffers) for kind, buffers in self.buffers.items()}
        copies = {}  # by address: tied weights are copied once, and stay tied
        try:
            devices = {t.device for t in tensors_in([model, optimizer]) if t.is_cuda}
            model, optimizer = self._copy(model, free, copies), self._copy(optimizer, free, copies)
            for device in devices:
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            return self._failed(state["step"], first_line(error))
        if not self._begin(self._save, state, model, optimizer, tokenizer_json):
            self._save(state, model, optimizer, tokenizer_json)

    def _copy(self, value, free, copies):
        if isinstance(value, dict):
            return {k: self._copy(v, free, copies) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(v, free, copies) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        whole = shard.full_tensor(value)  # first, for the other processes are at it too
        key = (shard.local_shard(value).data_ptr(), _kind(value))
        if key not in copies:
            if not free.get(key[1]):
                free[key[1]] = [_buffer(value)]
                self.buffers.setdefault(key[1], []).extend(free[key[1]])
            copies[key] = free[key[1]].pop().copy_(whole, non_blocking=whole.is_cuda)
        return copies[key]

    def _save(self, state, model, optimizer, tokenizer_json):
        try:
            save(self.run, state, model, optimizer, tokenizer_json)
            rotate(self.run, self.keep_last, self.mirror.uploading)
            self.saved = state["step"]
            with contextlib.suppress(OSError):
                run_log.append(self.run, {"step": state["step"], "event": "save"})
            self.mirror.wake()
        except Exception as error:  # OSError, and whatever torch.save makes of one
            why = in_words(error) if isinstance(error, OSError) else str(error)
            self._failed(state["step"], why)

    def mark_best(self, step: int, val_loss: float) -> None:
        """Have best.json name a step once it is written whole: only what is saved can be kept."""
        writing = self.thread
        if not self._begin(self._mark_best, writing, step, val_loss):
            self._mark_best(writing, step, val_loss)

    def _mark_best(self, writing, step, val_loss):
        if writing:
            writing.join()
        if self.saved == step:
            with contextlib.suppress(OSError):
                write_json(self.run / "best.json", {"step": step, "val_loss": val_loss})
                self.best = val_loss
            self.mirror.wake()

    def _failed(self, step, why):
        print(
            f"\nstep {step:,} could not be saved in {self.run}: {why}. Training goes on; the last"
            f" checkpoint is step {self.saved:,}",
            file=sys.stderr,
            flush=True,
        )

    def wait(self) -> None:
        """Until what was begun is written."""
        if self.thread:
            self.thread.join()
            self.thread = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self.thread is not None and self.thread.is_alive()


def _kind(tensor):
    """Tensors of one kind can share a buffer, one after the other."""
    return tensor.shape, tensor.dtype, tensor.device.type


def _buffer(tensor):
    """Memory for a copy of `tensor` on the CPU.

    Page-locked for a GPU's tensor, which copies into it several times faster.
    """
    try:
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        ).zero_()
    except RuntimeError:  # no page-locked memory to be had
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
