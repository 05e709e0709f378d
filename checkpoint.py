"""A run's state <-> checkpoints/<run>/.

Owner of that folder's format: step folders, best.json, config.json and log.jsonl. A step folder is
whole or it does not exist: it is written under a temporary name, flushed to disk, and renamed.
Knows tensors and plain values, not what they mean.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import torch

from model import GPTConfig

FORMAT = 1
ROOT = Path("checkpoints")
DRIVE = Path("/content/drive")  # where Colab mounts it
STEP_NAME = re.compile(r"step_(\d+)$")


# What older checkpoints say of the model besides: with one of these values it is the GPT-2 of
# model.py.
GONE = {
    "norm": ["layernorm"],
    "logit_softcap": [0.0],
    "position": ["learned"],
    "qk_norm": [False],
    "activation": ["gelu"],
    "zero_init": [False, True],
    "shortcut": [False],
    "value_residual": [False],
}


class CheckpointError(ValueError):
    """A checkpoint that is missing or cannot be used, in a sentence for the user."""


def save(run: Path, state: dict, model: dict, optimizer: dict, tokenizer_json: str) -> Path:
    """Write run/step_N/ with model.pt, optimizer.pt, tokenizer.json and state.json; returns it.

    state: plain values, state["step"] among them. model, optimizer: state dicts of tensors and
    plain values. Raises OSError when the disk does not take it; nothing of it is left then.
    """
    final = run / f"step_{state['step']:08d}"
    partial = run / f".{final.name}.partial"
    _delete(partial)
    try:
        partial.mkdir(parents=True)
        check_room(run, tensor_bytes(model) + tensor_bytes(optimizer))
        _write(partial, state, model, optimizer, tokenizer_json)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        sync(run)
    except BaseException:
        _delete(partial)
        raise
    return final


def _write(partial, state, model, optimizer, tokenizer_json):
    """All files of a step folder, flushed to the disk."""
    torch.save(model, partial / "model.pt")
    torch.save(optimizer, partial / "optimizer.pt")
    (partial / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8", newline="\n")
    files = {
        name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)}
        for name in ("model.pt", "optimizer.pt", "tokenizer.json")
    }
    state = (
        {"format": FORMAT, "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | state | {"files": files}
    )
    write_json(partial / "state.json", state | {"sha256": fingerprint(state)})
    for file in partial.iterdir():
        sync(file)
    sync(partial)


class Saver:
    """Saves from a thread, from a copy of the state: training waits for the copy alone. One save is
    in flight at most.

    saved: the step last written whole; best: the validation loss in best.json. A save that fails is
    reported, and the run goes on.
    """

    def __init__(self, run: Path, keep_last: int, saved: int = 0, best: float = math.inf):
        self.run, self.keep_last, self.saved, self.best = run, keep_last, saved, best
        self.thread, self.buffers = None, {}

    def reserve(self, tensors: list[torch.Tensor]) -> None:
        """Have memory for copies of these at hand before the first save. Touching new memory takes
        longer than the copy does.
        """
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
        with contextlib.suppress(
            RuntimeError, MemoryError
        ):  # the save itself will say that memory is short
            for t in tensors:
                self.buffers.setdefault(_kind(t), []).append(_buffer(t))

    def save(self, state: dict, model: dict, optimizer: dict, tokenizer_json: str) -> None:
        """Copy the state and have it written; waits for the save before, if that is still being
        written.
        """
        self.wait()
        free = {kind: list(buffers) for kind, buffers in self.buffers.items()}
        copies = {}  # by address: tied weights are copied once, and stay tied
        try:
            devices = {t.device for t in _tensors([model, optimizer]) if t.is_cuda}
            model, optimizer = self._copy(model, free, copies), self._copy(optimizer, free, copies)
            for device in devices:
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            return self._failed(state["step"], str(error).splitlines()[0])
        if not self._begin(self._save, state, model, optimizer, tokenizer_json):
            self._save(state, model, optimizer, tokenizer_json)

    def _copy(self, value, free, copies):
        if isinstance(value, dict):
            return {k: self._copy(v, free, copies) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(v, free, copies) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), _kind(value))
        if key not in copies:
            if not free.get(key[1]):
                free[key[1]] = [_buffer(value)]
                self.buffers.setdefault(key[1], []).extend(free[key[1]])
            copies[key] = free[key[1]].pop().copy_(value, non_blocking=value.is_cuda)
        return copies[key]

    def _save(self, state, model, optimizer, tokenizer_json):
        try:
            save(self.run, state, model, optimizer, tokenizer_json)
            rotate(self.run, self.keep_last)
            self.saved = state["step"]
            with contextlib.suppress(OSError):
                append_log(self.run, {"step": state["step"], "event": "save"})
        except Exception as error:  # OSError, and whatever torch.save makes of one
            self._failed(state["step"], error)

    def mark_best(self, step: int, val_loss: float) -> None:
        """Have best.json name a step when it is written whole: what cannot be saved cannot be the
        best that is kept.
        """
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
    """Memory for a copy of `tensor` on the CPU; page-locked for a GPU's, which copies into it
    several times faster.
    """
    try:
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        ).zero_()
    except RuntimeError:  # no page-locked memory to be had
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _tensors(value):
    """All tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _tensors(v)


def tensor_bytes(value) -> int:
    """Bytes of all tensors in nested dicts and lists; what shares memory counts once."""
    return sum({t.data_ptr(): t.nbytes for t in _tensors(value)}.values())


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where a file system has not `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.02 + (1 << 20):
        raise OSError(
            f"it takes {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free; make room, or lower"
            " keep_last"
        )


def write_json(path: Path, value: dict) -> None:
    """Write a small JSON file whole or not at all."""
    _write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_text(path, text):
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    sync(partial)
    os.replace(partial, path)


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on the disk itself."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network mounts sync no folders
            raise
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fingerprint(state: dict) -> str:
    """Checksum of state.json's values, but for the checksum itself."""
    values = {k: v for k, v in state.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def steps(run: Path) -> list[Path]:
    """The step folders of a run, oldest first."""
    return sorted((p for p in run.glob("step_*") if STEP_NAME.search(p.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a step folder's name."""
    return int(STEP_NAME.search(folder.name)[1])


def read_state(folder: Path, names=("model.pt", "optimizer.pt", "tokenizer.json")) -> dict:
    """state.json, after comparing size and checksum of the files `names`. Raises CheckpointError
    naming what is wrong.
    """
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {state['format']}, this code reads format {FORMAT}"
            )
        if state["sha256"] != fingerprint(state):
            raise CheckpointError(f"{path} is damaged: its values are not those it was saved with")
        for name in names:
            known, file = state["files"][name], folder / name
            if not file.exists():
                raise CheckpointError(f"{file} is missing")
            if file.stat().st_size != known["bytes"]:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size:,} bytes, it was saved with"
                    f" {known['bytes']:,}"
                )
            if sha256(file) != known["sha256"]:
                raise CheckpointError(
                    f"{file} is damaged: its checksum is not the one it was saved with"
                )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error}); start again, or move it away to use an older one"
        ) from error
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    return state


def read_shape(folder: Path, state: dict) -> GPTConfig:
    """The shape of the model in a step folder: what its state lacks takes its default.

    Raises CheckpointError for what model.py does not build, and for a switch that was used and is
    gone.
    """
    try:
        known = {k: v for k, v in state["model"].items() if k in GPTConfig.__dataclass_fields__}
        gone = {k: v for k, v in state["model"].items() if k not in known}
        used = [f"{k} = {v}" for k, v in gone.items() if v not in GONE.get(k, [])]
        if used:
            raise ValueError(
                f"it was trained with {', '.join(used)}, which this version of the code has no more"
            )
        return GPTConfig(**known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None


def load_tensors(path: Path, mmap: bool = True) -> dict:
    """The tensors of model.pt or optimizer.pt, on the CPU. Executes nothing: only tensors and plain
    values are read. mmap: they lie in the file, for who copies them; what is used as it comes
    would hold on to the file.
    """
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path)
        )  # files of before 2020 are no zip
    except Exception as error:  # pickle, zip and torch each have their own
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        why = (
            f"it holds more than tensors ({foreign[1]}), and reading that could execute code"
            if foreign
            else (str(error) or type(error).__name__).splitlines()[0]
        )
        raise CheckpointError(f"{path} cannot be loaded: {why}") from None


def latest(run: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest whole step folder, its state, and what was wrong with those passed over; (None,
    {}, ...) if there is none.
    """
    problems = []
    for folder in reversed(steps(run)):
        try:
            return folder, read_state(folder), problems
        except CheckpointError as error:
            if isinstance(
                error.__cause__, OSError
            ):  # a mount that fails for a moment damages nothing
                raise
            problems.append(str(error))
    return None, {}, problems


def find(path: str | Path | None) -> Path:
    """The step folder to generate from. path: a step folder; a run, for its best step by validation
    loss, else its newest; None, for the newest run under checkpoints/. Raises CheckpointError
    that lists what there is.
    """
    if path is None:
        runs = sorted(
            (p for p in ROOT.glob("*") if steps(p)), key=lambda run: steps(run)[-1].stat().st_mtime
        )
        if not runs:
            raise CheckpointError(
                f"no checkpoint under {ROOT}/ yet; train one: python train.py config/demo.py"
            )
        path = runs[-1]
    path = Path(path)
    if (path / "state.json").exists() or (STEP_NAME.search(path.name) and path.is_dir()):
        return path
    found = steps(path)
    if not found:
        raise CheckpointError(f"no checkpoint at {path}; {what_is_there(path)}")
    best = path / f"step_{best_of(path) or 0:08d}"
    return best if best in found else found[-1]


def what_is_there(path: Path) -> str:
    """In words, what a path that holds no checkpoint holds instead, and where checkpoints are."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        here = (
            f"it holds {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            if names
            else "it is empty"
        )
    else:
        here = (
            "it is a file, and a checkpoint is a folder" if path.exists() else "it does not exist"
        )
    runs = sorted(p.as_posix() for p in ROOT.glob("*") if steps(p))
    return here + (
        f"; runs with checkpoints: {', '.join(runs)}"
        if runs
        else f"; there are none under {ROOT}/ either"
    )


def read_json(path: Path, **fields: type) -> dict | None:
    """The object in a small JSON file, or None where there is none, it is damaged, or one of
    `fields` is not there in its type.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        values
        if isinstance(values, dict)
        and all(type(values.get(name)) is kind for name, kind in fields.items())
        else None
    )


def best_of(run: Path) -> int | None:
    """The step of the best evaluation so far."""
    return (read_json(run / "best.json", step=int) or {}).get("step")


def set_aside(run: Path, step: int) -> None:
    """Rename step folders beyond `step`: damaged ones, that a resumed run passed over and that must
    not count as its newest.
    """
    for folder in steps(run):
        if step_of(folder) > step:
            os.replace(folder, folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))


def rotate(run: Path, keep_last: int) -> None:
    """Delete all step folders but the newest `keep_last` and the best, and what interrupted saves
    left behind.
    """
    best = best_of(run)
    for folder in steps(run)[:-keep_last]:
        if step_of(folder) != best:
            _delete(folder)
    for partial in run.glob(".step_*.partial"):
        _delete(partial)


def _delete(folder):
    """Delete a step folder. On a mounted Drive its files are emptied first: there they go to the
    trash, which counts, at their size.
    """
    hidden = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.partial")
    with contextlib.suppress(OSError):
        os.replace(folder, hidden)  # so that a crash leaves no half of it
        for file in hidden.iterdir() if folder.resolve().is_relative_to(DRIVE.resolve()) else ():
            os.truncate(file, 0)
    shutil.rmtree(hidden, ignore_errors=True)


def append_log(run: Path, *records: dict) -> None:
    """Add lines to log.jsonl."""
    with open(run / "log.jsonl", "a", encoding="utf-8", newline="\n") as f:
        f.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_log(run: Path) -> list[dict]:
    """The records of log.jsonl; a line cut short by a crash is passed over."""
    return list(iterate_log(run))


def iterate_log(run: Path):
    """The same, one after the other: a long log need not lie in memory."""
    if (run / "log.jsonl").exists():
        with open(
            run / "log.jsonl", encoding="utf-8", errors="replace", newline="\n"
        ) as f:  # "\n" alone ends a line: a text may hold U+2028
            for line in f:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def write_log(run: Path, records: list[dict]) -> None:
    """Replace log.jsonl, whole or not at all: a resumed run drops what came after its checkpoint."""
    _write_text(
        run / "log.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    )
