"""Trained weights with what belongs to them: a checkpoint of ours, or a Hugging Face folder.

formats/run_folder.py and formats/huggingface.py know these folders. An address is copied to this
disk first.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import hardware
from formats import files, huggingface, mirror, run_folder
from formats.address import AddressError, Folder, local_copy, protocol_of
from formats.conversation import PLAIN, Form, form_of
from formats.data_folder import FORM
from formats.run_folder import CheckpointError
from model import GPT, GPTConfig, rotary_table
from tokenizer_bpe import Tokenizer, TokenizerError

ORIGIN = "fetched.json"  # in a fetched folder: the versions of its files


@dataclass
class Pretrained:
    """The weights in a folder.

    config: their shape. tensors: on the CPU, under the names of model.GPT. tokenizer: None where
    the folder has none. state: of a step folder, its state.json; else empty.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    state: dict

    def model(self) -> GPT:
        """A model that holds the tensors, on the CPU. Its own are not made: that would take 3 s."""
        with torch.device("meta"):
            model = GPT(self.config)
        fill(model, self.tensors, self.path, assign=True)
        if self.config.tie_weights:
            model.lm_head.weight = model.wte.weight
        if model.rotary is not None:
            model.rotary = rotary_table(self.config)
        return model

    @property
    def form(self) -> Form:
        """How conversations read for the model: as its data has them, else as for its tokenizer.

        Data that names no form is of a tokenizer without markers, or of an earlier version.
        """
        data = self.state.get("data", {})
        return PLAIN if "masks" in data and FORM not in data else form_of(self.tokenizer)

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most their own: of learned positions, the first."""
        tensors = dict(self.tensors)
        if "wpe.weight" in tensors:
            tensors["wpe.weight"] = tensors["wpe.weight"][:block_size]
        return tensors


def read_shape(folder: Path, state: dict) -> GPTConfig:
    """The shape of the model in a step folder: what its state lacks takes its default.

    Raises CheckpointError for what model.py does not build.
    """
    try:
        return GPTConfig(**state["model"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None


def load_tensors(path: Path) -> dict:
    """The content of model.pt or optimizer.pt, on the CPU.

    Executes nothing: only tensors and plain values are read. The tensors stay in the file until
    they are used. Raises CheckpointError.
    """
    is_utf8 = os.fsencode(path).decode("utf-8", "replace") == str(path)  # torch maps no other path
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_utf8)
    except Exception as error:  # pickle, zip and torch each have their own
        raise CheckpointError(f"{path} cannot be loaded: {files.error_message(error)}") from None


def fill(model: GPT, tensors: dict[str, torch.Tensor], folder: Path, assign: bool = False) -> None:
    """Copy the weights of a folder into a model; assign: it takes the tensors as its own.

    Raises CheckpointError where model.py has other parameters now.
    """
    try:
        model.load_state_dict(tensors, assign=assign)
    except RuntimeError:
        own = model.state_dict()
        names = [*own, *(name for name in tensors if name not in own)]
        shapes = [{name: t.shape for name, t in these.items()} for these in (own, tensors)]
        differ = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
        if not differ:
            raise
        raise CheckpointError(
            f"{folder} does not fit this code's model, which has another {files.few(differ)}; undo"
            " the change of model.py, or start a run with another checkpoint_dir"
        ) from None


def load(path: str | Path | None) -> Pretrained:
    """The weights at `path`, as resolve() finds them; their `path` is the folder on this disk.

    Raises CheckpointError for what is missing, damaged or of another architecture, and for files
    that hold more than tensors; otherwise as resolve() does.
    """
    folder = resolve(path)
    try:
        return read(folder)
    except (CheckpointError, OSError, TokenizerError):
        if folder.exists() or folder == Path(path or ""):
            raise
    return load(path)  # a training process has saved and rotated: look again


def read(folder: Path) -> Pretrained:
    """The weights in a folder of this disk. Raises as load() does."""
    if is_hf(folder):
        config, tokenizer = huggingface.read_config(folder), None
        check_memory(config, folder)
        tensors = huggingface.from_hf(config, huggingface.read_tensors(folder), folder)
        if (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists():
            tokenizer = Tokenizer.load(folder)
        return Pretrained(folder, config, tensors, tokenizer, state={})
    state = check_step(folder)
    config = read_shape(folder, state)
    tensors = load_tensors(folder / "model.pt")
    return Pretrained(folder, config, tensors, Tokenizer.load(folder), state)


def check_memory(config: GPTConfig, folder: Path) -> None:
    """Raises CheckpointError where weights of this shape, in float32, exceed the free memory."""
    with torch.device("meta"):
        needed = 4 * GPT(config).num_parameters()
    free = hardware.free_ram() or math.inf
    if needed > free:
        raise CheckpointError(
            f"the weights in {folder} take {needed / 1e9:.1f} GB of memory in float32, and"
            f" {free / 1e9:.1f} GB are free; close other programs, or choose a smaller model"
        )


def check_step(folder: Path) -> dict:
    """The state of a step. Raises CheckpointError where it or its weights are damaged."""
    try:
        return run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
    except CheckpointError as error:
        others = [step.as_posix() for step in run_folder.steps(folder.parent) if step != folder]
        hint = f"; the run also has {files.few(others)}" if others else ""
        raise CheckpointError(f"{error}{hint}") from None


def load_run(path: str | Path | None) -> Pretrained:
    """As load(), of a run or a step of ours. Raises CheckpointError for another folder, too."""
    found = load(path)
    check_run(found.path)
    return found


def check_run(folder: Path) -> None:
    """Raises CheckpointError for a folder in Hugging Face's format."""
    if is_hf(folder):
        raise CheckpointError(
            f"{folder} is a folder in Hugging Face's format, as tools.export writes it; give the"
            " run itself"
        )


def resolve(path: str | Path | None) -> Path:
    """The folder with the weights that a path or an address means, on this disk.

    path: a run (its best step by validation loss, else its newest), a step of one, or a folder in
    Hugging Face's format; the address of a run or such a folder, which is fetched; None: the run
    under checkpoints/ that was saved last. Raises CheckpointError that lists what there is,
    AddressError, and OSError where the disk does not take the copy of an address.
    """
    if protocol_of(str(path)):
        return fetch(str(path))
    if path is not None and is_hf(Path(path)):
        return Path(path)
    return run_folder.find(path)


def is_hf(folder: Path) -> bool:
    """True if the folder is in Hugging Face's format: its config.json names an architecture."""
    return "model_type" in files.read_json(folder / "config.json")


def fetch(address: str) -> Path:
    """Copy a folder in Hugging Face's format, or a step of a run, from an address to this disk.

    One of several processes fetches it, and the others wait. A folder in Hugging Face's format is
    fetched again once its files have changed. Returns the folder. Raises as resolve() does.
    """
    there = Folder(address)
    with local_copy(there) as here:
        try:
            sizes = there.list()
        except AddressError as error:
            if not is_hf(here):
                raise
            print(f"{error}. Using the copy in {here}", file=sys.stderr)
            return here
        if "config.json" in sizes and b'"model_type"' in there.read("config.json"):
            wanted = huggingface.needed(sizes)
            versions = there.versions(wanted)
            if is_hf(here) and files.read_json(here / ORIGIN) == versions:
                return here
            with files.atomic_folder(here) as partial:
                there.get_large({name: sizes[name] for name in wanted}, partial)
                if there.versions(wanted) != versions:
                    raise AddressError(f"{address} changed while it was fetched; start again")
                files.write_json(partial / ORIGIN, versions)
            return here
    return mirror.fetch_to_read(address)
