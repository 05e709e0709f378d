"""A run's state <-> checkpoints/<run>/: step folders, and best.json.

A step folder is whole or it does not exist: it is written under a temporary name, flushed to disk,
and renamed. Knows tensors and plain values, not what they mean.
"""

import hashlib
import json
import os
import re
import time
import zipfile
from pathlib import Path

import torch

from formats.files import (
    atomic_folder,
    check_room,
    delete_folder,
    error_message,
    read_json,
    sha256,
    write_json,
)
from model import GPTConfig, expected_shapes

FORMAT = 1
ROOT = Path("checkpoints")
STEP_NAME = re.compile(r"step_(\d+)")
FILES = ("model.pt", "optimizer.pt", "tokenizer.json")  # of a step folder, next to state.json


class CheckpointError(ValueError):
    """A checkpoint that is missing or cannot be used, in a sentence for the user."""


def save(run: Path, state: dict, model: dict, optimizer: dict, tokenizer_json: str) -> Path:
    """Write run/step_N/ with model.pt, optimizer.pt, tokenizer.json and state.json; returns it.

    state: plain values. model, optimizer: state dicts of tensors and plain values. Raises OSError
    where the disk does not take it; nothing of it is left then.
    """
    final = run / step_name(state["step"])
    with atomic_folder(final) as partial:
        check_room(run, tensor_bytes(model) + tensor_bytes(optimizer), "lower keep_last")
        torch.save(model, partial / "model.pt")
        torch.save(optimizer, partial / "optimizer.pt")
        (partial / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8", newline="\n")
        write_json(partial / "state.json", _described(state, partial))
    return final


def _described(state, folder):
    """The content of state.json: the state, and the files' sizes and checksums."""
    files = {}
    for name in FILES:
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    saved = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    content = {"format": FORMAT, "saved": saved} | state | {"files": files}
    return content | {"sha256": fingerprint(content)}


def tensors_in(value):
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def tensor_bytes(value) -> int:
    """Bytes of all tensors in nested dicts and lists; what shares memory counts once."""
    return sum({t.data_ptr(): t.nbytes for t in tensors_in(value)}.values())


def fingerprint(values: dict) -> str:
    """Checksum of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


def steps(run: Path) -> list[Path]:
    """The step folders of a run, oldest first."""
    return sorted((p for p in run.glob("step_*") if STEP_NAME.fullmatch(p.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a step folder's name."""
    return int(STEP_NAME.fullmatch(folder.name)[1])


def read_state(folder: Path, names=FILES) -> dict:
    """state.json, after comparing size and checksum of the files `names`.

    Raises CheckpointError naming what is wrong. Its cause is an OSError where the folder could not
    be read just now, which damages nothing.
    """
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {state['format']}, this code reads format {FORMAT}"
            )
        values = {name: value for name, value in state.items() if name != "sha256"}
        if state["sha256"] != fingerprint(values):
            raise CheckpointError(f"{path} is damaged: its values are not those it was saved with")
        for name in names:
            file, known = folder / name, state["files"][name]
            if file.stat().st_size != known["bytes"] or sha256(file) != known["sha256"]:
                raise CheckpointError(f"{file} is damaged: it is not what was saved")
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error_message(error)}); start again, or move it away to"
            " use an older one"
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    return state


def read_shape(folder: Path, state: dict) -> GPTConfig:
    """The shape of the model in a step folder: what its state lacks takes its default.

    Raises CheckpointError for what model.py does not build.
    """
    try:
        return GPTConfig(**state["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None


def load_model(folder: Path, state: dict) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """The shape and the tensors of the model in a step folder. Raises CheckpointError."""
    config, tensors = read_shape(folder, state), load_tensors(folder / "model.pt")
    check_tensors(folder, config, tensors)
    return config, tensors


def check_tensors(folder: Path, config: GPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError unless names and shapes are those of a model of this shape."""
    expected = expected_shapes(config)
    found = {name: tuple(getattr(t, "shape", ())) for name, t in tensors.items()}
    wrong = [
        f"{name}: {found.get(name, 'missing')}, expected {expected.get(name, 'no such tensor')}"
        for name in sorted(expected.keys() | found.keys(), key=str)
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit their description: {'; '.join(wrong[:4])}{more}"
        )


def load_tensors(path: Path) -> dict:
    """The tensors of model.pt or optimizer.pt, on the CPU.

    Executes nothing: only tensors and plain values are read. They stay in the file, for who copies
    them. Raises CheckpointError.
    """
    try:
        mmap = zipfile.is_zipfile(path)  # files of before 2020 are none
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # pickle, zip and torch each have their own
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            why = f"it holds more than tensors ({foreign[1]}), and reading that could execute code"
        else:
            why = error_message(error)
        raise CheckpointError(f"{path} cannot be loaded: {why}") from None


def latest(run: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest whole step folder, its state, and what was wrong with those passed over.

    (None, {}, ...) if there is none.
    """
    problems = []
    for folder in reversed(steps(run)):
        try:
            return folder, read_state(folder), problems
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # a mount that fails for a moment
                raise
            problems.append(str(error))
    return None, {}, problems


def find(path: str | Path | None) -> Path:
    """The step folder to generate from.

    path: a step folder; a run, for its best step by validation loss, else its newest; None, for the
    run under checkpoints/ that was saved last. Raises CheckpointError that lists what there is.
    """
    if path is None:
        runs = runs_with_steps()
        if not runs:
            raise CheckpointError(
                f"no checkpoint under {ROOT}/ of {Path.cwd()} yet; train one: python train.py"
                " config/demo.py"
            )
        path = max(runs, key=lambda run: steps(run)[-1].stat().st_mtime)
    path = Path(path)
    if (path / "state.json").exists() or (STEP_NAME.fullmatch(path.name) and path.is_dir()):
        return path
    found = steps(path)
    if not found:
        raise CheckpointError(f"no checkpoint at {path}; {what_is_there(path)}")
    best = path / step_name(best_of(path) or 0)
    return best if best in found else found[-1]


def runs_with_steps() -> list[Path]:
    """The runs under checkpoints/ that have saved, by name."""
    return sorted(path for path in ROOT.glob("*") if steps(path))


def what_is_there(path: Path) -> str:
    """In words, what a path without a checkpoint is, and where checkpoints are."""
    here = "it holds no step_* folder" if path.exists() else "it does not exist"
    if path.is_file():
        here = "it is a file, not the folder of a run or a step"
    runs = ", ".join(run.as_posix() for run in runs_with_steps())
    if runs:
        return f"{here}; runs with checkpoints: {runs}"
    return f"{here}; there are none under {ROOT}/ of {Path.cwd()} either"


def best_of(run: Path) -> int | None:
    """The step of the best evaluation so far."""
    return (read_json(run / "best.json", step=int) or {}).get("step")


def set_aside(run: Path, step: int) -> None:
    """Rename step folders beyond `step`, which are damaged.

    A resumed run passed over them; they must not count as its newest.
    """
    for folder in steps(run):
        if step_of(folder) > step:
            os.replace(folder, folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))


def rotate(run: Path, keep_last: int) -> None:
    """Delete all step folders but the newest `keep_last` and the best."""
    best = best_of(run)
    for folder in steps(run)[:-keep_last]:
        if step_of(folder) != best:
            delete_folder(folder)
    delete_partial(run)


def delete_partial(run: Path) -> None:
    """Delete what interrupted saves left."""
    for partial in run.glob(".step_*.partial"):
        delete_folder(partial)


def saw_conversations(state: dict) -> bool:
    """Whether a run was trained on conversations. state: of a step folder."""
    return "masks" in state["data"]
