"""Weights to start from: a checkpoint of ours, or a local folder in Hugging Face's format.

Knows whether weights fit the settings and the data of a run. What the folders look like is in
formats/run_folder.py and formats/huggingface.py.
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
    """What can be started from.

    config: its shape. tensors: float32, under the names of model.GPT. tokenizer: None where the
    folder has none.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None

    def check_fits(self, settings, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError where the run is about another model or another tokenizer.

        settings: the run's; those that were given must not ask for another shape. A shorter context
        is no contradiction; a longer one is: its positions were never trained. tokenizer: the
        data's.
        """
        self._check_tokenizer(settings.data_dir, tokenizer)
        differences = []
        for name, trained in dataclasses.asdict(self.config).items():
            if name in FREE or name not in settings.given:
                continue
            now = getattr(settings, name)
            difference = f"  {name}: {trained} in the weights, {now} in the settings"
            if name != "block_size" and now != trained:
                differences.append(difference)
            if name == "block_size" and now > trained:
                differences.append(f"{difference} (a shorter context would do)")
        if differences:
            raise CheckpointError(
                f"init_from = {self.path} has another shape; leave out these settings to take its"
                " own, or start from nothing:\n" + "\n".join(differences)
            )

    def _check_tokenizer(self, data_dir, tokenizer):
        prepare = (
            "prepare the text with the weights' own:\n  python prepare_data.py TEXT --tokenizer"
            f" {self.path} --out data/NAME"
        )
        if self.tokenizer and not self.tokenizer.same_as(tokenizer):
            here, there = (f"{t.kind} of {t.vocab_size:,}" for t in (tokenizer, self.tokenizer))
            raise CheckpointError(
                f"{data_dir} was made with another tokenizer ({here}) than the weights of"
                f" {self.path} ({there}), so its ids mean other text to them; {prepare}"
            )
        padding = self.config.vocab_size - tokenizer.vocab_size
        likely_another = padding >= 64 and not self.tokenizer
        if padding < 0 or likely_another:
            raise CheckpointError(
                f"{data_dir} has a vocabulary of {tokenizer.vocab_size:,}, the weights of"
                f" {self.path} one of {self.config.vocab_size:,}; {prepare}"
            )

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most its own: of learned positions, the first."""
        tensors = dict(self.tensors)
        if "wpe.weight" in tensors:
            tensors["wpe.weight"] = tensors["wpe.weight"][:block_size]
        return tensors


def load(path: str | Path) -> Pretrained:
    """The weights at `path`.

    path: a run (its best step, else its newest), a step of one, or a folder in Hugging Face's
    format. Raises CheckpointError for what is missing, damaged or of another architecture, and for
    files that hold more than tensors.
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
