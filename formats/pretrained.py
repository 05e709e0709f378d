"""Weights to start from: a checkpoint of ours, or a local folder in Hugging Face's format (GPT-2 or
Qwen3).

Knows whether weights fit the settings and the data of a run; what the folders look like, formats/
and formats/run_folder.py know.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from formats import files, huggingface, run_folder
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer

FREE = ("dropout",)  # of GPTConfig: no property of trained weights


@dataclass
class Pretrained:
    """What can be started from. config: its shape; tensors: float32, under the names of model.GPT;
    tokenizer: None where the folder has none.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None

    def check_fits(self, settings, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError where the settings that were given ask for another shape, or
        `tokenizer`, the data's, is another one.

        A shorter context is no contradiction; a longer one is: its positions were never trained.
        """
        prepare = (
            "prepare the text with the weights' own:\n  python prepare_data.py TEXT --tokenizer"
            f" {self.path} --out data/NAME"
        )
        if self.tokenizer and not self.tokenizer.same_as(tokenizer):
            here, there = (f"{t.kind} of {t.vocab_size:,}" for t in (tokenizer, self.tokenizer))
            raise CheckpointError(
                f"{settings.data_dir} was made with another tokenizer ({here}) than the weights of"
                f" {self.path} ({there}), so its ids mean other text to them; {prepare}"
            )
        padding = self.config.vocab_size - tokenizer.vocab_size
        if padding < 0 or (
            padding >= 64 and not self.tokenizer
        ):  # without a tokenizer of their own it may be another
            raise CheckpointError(
                f"{settings.data_dir} has a vocabulary of {tokenizer.vocab_size:,}, the weights of"
                f" {self.path} one of {self.config.vocab_size:,}; {prepare}"
            )
        differences = []
        for name, value in dataclasses.asdict(self.config).items():
            now = getattr(settings, name, value)
            if (
                name in settings.given
                and name not in FREE
                and now != value
                and not (name == "block_size" and now < value)
            ):
                differences.append(
                    f"  {name}: {value} in the weights, {now} in the settings"
                    + (" (a shorter context would do)" if name == "block_size" else "")
                )
        if differences:
            raise CheckpointError(
                f"init_from = {self.path} has another shape; leave out these settings to take its"
                " own, or start from nothing:\n" + "\n".join(differences)
            )

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most its own: of learned positions, the first."""
        return {k: v[:block_size] if k == "wpe.weight" else v for k, v in self.tensors.items()}


def load(path: str | Path) -> Pretrained:
    """The weights at `path`: a run (its best step, else its newest), a step of one, or a folder in
    Hugging Face's format.

    Raises CheckpointError for what is missing, damaged or of another architecture, and for files
    that hold more than tensors.
    """
    path = Path(path)
    if "model_type" in (files.read_json(path / "config.json") or {}):
        return load_hf(path)
    folder = run_folder.find(path)
    state = run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
    config = run_folder.read_shape(folder, state)
    tensors = run_folder.load_tensors(folder / "model.pt")
    huggingface.check_tensors(folder, config, tensors)
    return Pretrained(folder, config, tensors, Tokenizer.load(folder / "tokenizer.json"))


def fill_shape(settings, shape: dict) -> None:
    """Set the shape settings that were not given to those of `shape`."""
    for name, value in shape.items():
        if hasattr(settings, name) and name not in settings.given and name not in FREE:
            setattr(settings, name, value)


def load_hf(folder: Path) -> Pretrained:
    """A folder in Hugging Face's format. Raises as `load` does."""
    config = huggingface.read_config(folder)
    tensors = huggingface.from_hf(config, huggingface.read_tensors(folder))
    huggingface.check_tensors(folder, config, tensors)
    has_tokenizer = (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()
    return Pretrained(folder, config, tensors, Tokenizer.load(folder) if has_tokenizer else None)
