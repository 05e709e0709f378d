"""Loads trained weights and their tokenizer, from a checkpoint of ours or a Hugging Face folder.

formats/run_folder.py and formats/huggingface.py know these folders. Folders at an address are first
copied to this disk.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import hardware
from command_line import without_credentials
from formats import files, huggingface, mirror, run_folder
from formats.address import PAGE, AddressError, Folder, local_copy, protocol_of
from formats.conversation import DEFAULT_SYSTEM, PLAIN, START, form_of
from formats.fingerprint import fingerprint, same
from formats.run_folder import CheckpointError
from formats.shapes import without_weights
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer, TokenizerError

ORIGIN = "fetched.json"  # in a fetched folder: the versions of its files


@dataclass
class Pretrained:
    """A model as loaded from a folder.

    config: its shape. tensors: on the CPU, under the names of model.GPT. tokenizer: None if the
    folder has none. state: the content of a step folder's state.json; else empty.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    state: dict

    def model(self) -> GPT:
        """A GPT on the CPU with these tensors. Skips random initialization, which takes 3 s."""
        model = without_weights(self.config)
        fill(model, self.tensors, self.path, assign=True)
        if self.config.tie_weights:
            model.lm_head.weight = model.wte.weight
        return model

    @property
    def chats(self) -> bool:
        """True if it was trained on conversations in the form of its tokenizer."""
        if self.state:
            return "masks" in self.state["data"]
        template = huggingface.read_chat_template(self.path)
        if form_of(self.tokenizer).markers:
            return START in template  # others' templates may hold more, such as tools
        # Exports of before December 2026 have a filter where a method is now.
        return template.replace(" | capitalize", ".capitalize()") == PLAIN.chat_template

    @property
    def system(self) -> str | None:
        """The system message of its chat template for conversations without one; None if none."""
        found = DEFAULT_SYSTEM.search(huggingface.read_chat_template(self.path))
        return found and found[1]

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text, besides the tokenizer's end-of-text."""
        return [] if self.state else huggingface.read_end_ids(self.path)

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a shorter context: keeps the first block_size learned positions."""
        tensors = dict(self.tensors)
        if "wpe.weight" in tensors:
            tensors["wpe.weight"] = tensors["wpe.weight"][:block_size]
        return tensors


def read_shape(folder: Path, state: dict) -> GPTConfig:
    """The shape of the model in a step folder, with defaults for what its state lacks.

    Warns if model.py has changed since. Raises CheckpointError if it does not support the shape.
    """
    try:
        config = GPTConfig(**state["model"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not fit this code's model: {error}; use the version of model.py that"
            " trained it"
        ) from None
    if "fingerprint" in state and not same(state["fingerprint"], fingerprint(config)):
        print(
            f"{folder}: model.py computes something else than when it trained these weights",
            file=sys.stderr,
        )
    return config


def load_tensors(path: Path) -> dict:
    """The content of model.pt or optimizer.pt, on the CPU.

    Reads only tensors and plain values, so it executes no code. Tensors are memory-mapped where
    possible. Raises CheckpointError.
    """
    is_utf8 = os.fsencode(path).decode("utf-8", "replace") == str(path)  # else torch cannot mmap it
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_utf8)
    except Exception as error:  # pickle, zip and torch each have their own types
        raise CheckpointError(f"{path} cannot be loaded: {files.error_message(error)}") from None


def fill(model: GPT, tensors: dict[str, torch.Tensor], folder: Path, assign: bool = False) -> None:
    """Load tensors into a model. assign: use them as its parameters rather than copy their values.

    folder: for the message. Raises CheckpointError if they do not match model.py's parameters.
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
    """Load the weights that resolve(path) finds; the result's `path` is the local folder.

    Raises CheckpointError if they are missing, damaged, of another architecture, or in a file that
    holds more than tensors; otherwise raises as resolve() does.
    """
    folder = resolve(path)
    try:
        return read(folder)
    except (CheckpointError, OSError, TokenizerError):
        if folder.exists() or folder == Path(path or ""):
            raise
    return load(path)  # a training process has saved and rotated: look again


def load_with_tokenizer(path: str | Path | None) -> Pretrained:
    """As load(). Raises CheckpointError if the folder has no tokenizer."""
    found = load(path)
    if not found.tokenizer:
        raise CheckpointError(f"{found.path} has no tokenizer.json; copy the model's own there")
    return found


def read(folder: Path) -> Pretrained:
    """Load the weights in a local folder. Raises as load() does."""
    config, state = check(folder)
    tokenizer = read_tokenizer(folder)
    if tokenizer and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{folder} has the tokenizer of another model: {tokenizer.vocab_size:,} ids, and"
            f" embeddings for {config.vocab_size:,}. If it is the model's own, and tokens were"
            " added to it, remove those that have no embedding from its added_tokens"
        )
    if state:
        tensors = load_tensors(folder / "model.pt")
    else:
        tensors = huggingface.from_hf(config, huggingface.read_tensors(folder), folder)
    return Pretrained(folder, config, tensors, tokenizer, state)


def check(folder: Path) -> tuple[GPTConfig, dict]:
    """The shape of the model in a local folder, and the state if it is a step, else {}.

    Checks what can be checked without loading the weights. Raises as load() does.
    """
    if run_folder.is_hf(folder):
        config = huggingface.read_config(folder)
        check_memory(config, folder)
        huggingface.check_weights([file.name for file in folder.iterdir()], folder)
        return config, {}
    try:
        state = run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
    except CheckpointError as error:
        others = [step.as_posix() for step in run_folder.steps(folder.parent) if step != folder]
        hint = f"; the run also has {files.few(others)}" if others else ""
        raise CheckpointError(f"{error}{hint}") from None
    config = read_shape(folder, state)
    return replace(config, block_size=state.get("context") or config.block_size), state


def check_memory(config: GPTConfig, folder: str | Path) -> None:
    """Raises CheckpointError if weights of this shape, in float32, exceed the free memory."""
    needed = 4 * without_weights(config).num_parameters()
    free = hardware.free_ram() or math.inf
    if needed > free:
        raise CheckpointError(
            f"the weights in {folder} take {needed / 1e9:.1f} GB of memory in float32, and"
            f" {free / 1e9:.1f} GB are free; close other programs, or choose a smaller model"
        )


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder with weights; None if it has none.

    Raises TokenizerError if it has one in another form.
    """
    names = ("tokenizer.json", "vocab.json")
    return Tokenizer.load(folder) if any((folder / name).exists() for name in names) else None


def resolve(path: str | Path | None) -> Path:
    """The local folder with the weights that a path or an address refers to.

    path: a run (its best step by validation loss, else its newest), a step of a run, or a folder in
    Hugging Face's format; the address of a run or of such a folder, which is downloaded; None for
    the run under checkpoints/ that was saved last. Raises CheckpointError, which lists what there
    is, AddressError, and OSError if writing the copy fails.
    """
    if protocol_of(str(path)):
        return fetch(str(path))
    if path is not None and run_folder.is_hf(Path(path)):
        return Path(path)
    return run_folder.find(path)


def fetch(address: str, weights: bool = True) -> Path:
    """Copy a folder in Hugging Face's format, or a step of a run, from an address to this disk.

    weights: False skips the weights of a folder in Hugging Face's format, if the tokenizer is
    enough. If several processes ask for it, one downloads and the others wait. A folder in Hugging
    Face's format is downloaded again if its files have changed. Returns the local folder. Raises as
    resolve() does.
    """
    if page := PAGE.match(address):
        raise AddressError(f"{address} is a page; the address of its files is hf://{page[1]}")
    there = Folder(address)
    with local_copy(there) as here:
        have = files.read_json(here / ORIGIN)
        try:
            sizes = there.list()
        except AddressError as error:
            if not have or (weights and not huggingface.weights_among(have)):
                raise
            print(f"{without_credentials(str(error))}. Using the copy in {here}", file=sys.stderr)
            return here
        values = files.object_in(there.read("config.json")) if "config.json" in sizes else {}
        if isinstance(values.get("model_type"), str):
            wanted = [name for name in sizes if name in huggingface.NEXT_TO_WEIGHTS]
            if weights or huggingface.weights_among(have):  # keeps them
                huggingface.check_weights(sizes, address)
                wanted += huggingface.weights_among(sizes)
            versions = there.versions(wanted)
            if have and versions.items() <= have.items():
                return here
            if weights:
                check_memory(huggingface.config_of(values, f"{address}/config.json"), address)
            with files.atomic_folder(here) as partial:
                there.get_large({name: sizes[name] for name in wanted}, partial)
                if there.versions(wanted) != versions:
                    raise AddressError(f"{address} changed while it was fetched; start again")
                files.write_json(partial / ORIGIN, versions)
            return here
        return mirror.fetch_to_read(address, here)
