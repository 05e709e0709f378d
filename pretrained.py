"""Weights to start from <-> model.py's names and layout: a checkpoint of ours, or a local folder in Hugging Face's GPT-2 format.

Owner of what is known of that format: config.json, and model.safetensors or pytorch_model.bin, also in shards. Reads it with torch
alone and executes nothing. Knows tensors and shapes, not how they are trained; tools/export.py writes what this file describes.
"""
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from checkpoint import CheckpointError
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer

# Our shape's names and theirs.
NAMES = {"vocab_size": "vocab_size", "block_size": "n_positions", "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "tie_weights": "tie_word_embeddings"}
# GPT-2 as model.py builds it. A config.json that lacks one of these means the first value.
FIXED = {
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
    "layer_norm_epsilon": [1e-5],
    "n_inner": [None],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "add_cross_attention": [False],
}
FREE = ("dropout", "zero_init")  # of GPTConfig: no property of trained weights
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors


@dataclass
class Pretrained:
    """What can be started from. config: its shape; tensors: float32, under the names of model.GPT; tokenizer: None where the folder has none."""

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None

    def check_fits(self, settings, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError where the settings that were given ask for another shape, or `tokenizer`, the data's, is another one.

        A shorter context is no contradiction; a longer one is: its positions were never trained.
        """
        prepare = f"prepare the text with the weights' own:\n  python prepare_data.py TEXT --tokenizer {self.path} --out data/NAME"
        if self.tokenizer and not self.tokenizer.same_as(tokenizer):
            here, there = (f"{t.kind} of {t.vocab_size:,}" for t in (tokenizer, self.tokenizer))
            raise CheckpointError(f"{settings.data_dir} was made with another tokenizer ({here}) than the weights of {self.path} ({there}), so its ids mean other text to them; {prepare}")
        if not tokenizer.vocab_size <= self.config.vocab_size < tokenizer.vocab_size + 64:  # up to 63 ids of padding
            raise CheckpointError(f"{settings.data_dir} has a vocabulary of {tokenizer.vocab_size:,}, the weights of {self.path} one of {self.config.vocab_size:,}; {prepare}")
        differences = []
        for name, value in dataclasses.asdict(self.config).items():
            now = getattr(settings, name, value)
            if name in settings.given and name not in FREE and now != value and not (name == "block_size" and now < value):
                differences.append(f"  {name}: {value} in the weights, {now} in the settings" + (" (a shorter context would do)" if name == "block_size" else ""))
        if differences:
            raise CheckpointError(f"init_from = {self.path} has another shape; leave out these settings to take its own, or start from nothing:\n" + "\n".join(differences))

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most its own: of learned positions, the first."""
        return {k: v[:block_size] if k == "wpe.weight" else v for k, v in self.tensors.items()}


def load(path: str | Path) -> Pretrained:
    """The weights at `path`: a run (its best step, else its newest), a step of one, or a folder in Hugging Face's GPT-2 format.

    Raises CheckpointError for what is missing, damaged or of another architecture, and for files that hold more than tensors.
    """
    path = Path(path)
    if "model_type" in (checkpoint.read_json(path / "config.json") or {}):
        return load_hf(path)
    folder = checkpoint.find(path)
    state = checkpoint.read_state(folder, ("model.pt", "tokenizer.json"))
    try:
        config = GPTConfig.saved(state["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None
    tensors = checkpoint.load_tensors(folder / "model.pt")
    check_tensors(folder, config, tensors)
    return Pretrained(folder, config, tensors, Tokenizer.load(folder / "tokenizer.json"))


def fill_shape(settings, shape: dict) -> None:
    """Set the shape settings that were not given to those of `shape`."""
    for name, value in shape.items():
        if hasattr(settings, name) and name not in settings.given and name not in FREE:
            setattr(settings, name, value)


def load_hf(folder: Path) -> Pretrained:
    """A folder in Hugging Face's GPT-2 format. Raises as `load` does."""
    config = read_hf_config(folder)
    tensors = from_hf(read_hf_tensors(folder))
    if config.tie_weights:
        tensors["lm_head.weight"] = tensors.get("wte.weight")
    check_tensors(folder, config, tensors)
    has_tokenizer = (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()
    return Pretrained(folder, config, tensors, Tokenizer.load(folder) if has_tokenizer else None)


def read_hf_config(folder: Path) -> GPTConfig:
    """The shape in a config.json. Raises CheckpointError listing all that model.py does not build."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    if values["model_type"] != "gpt2":
        raise CheckpointError(f"{path} describes the architecture {values['model_type']!r}; only 'gpt2' can be loaded here")
    odd = [f"{k} = {values[k]!r}" for k, allowed in FIXED.items() if k in values and values[k] not in allowed and not (k == "n_inner" and values[k] == 4 * values.get("n_embd", 0))]
    if odd:
        raise CheckpointError(f"{path}: {', '.join(odd)}; model.py has no counterpart to that")
    try:
        shape = {ours: values[theirs] for ours, theirs in NAMES.items() if ours != "tie_weights"}
        return GPTConfig(**shape, tie_weights=values.get("tie_word_embeddings", True))
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder under their names there, from whichever of the four forms it has."""
    for name, read in (("model.safetensors", read_safetensors), ("pytorch_model.bin", checkpoint.load_tensors)):
        if (folder / name).exists():
            return read(folder / name)
        index = checkpoint.read_json(folder / f"{name}.index.json", weight_map=dict)
        if index:
            parts = sorted({Path(part).name for part in index["weight_map"].values()})
            return {k: v for part in parts for k, v in read(folder / part).items()}
    raise CheckpointError(f"{folder} has no model.safetensors and no pytorch_model.bin; {checkpoint.what_is_there(folder)}")


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file: 8 bytes, the length of a header in JSON; the header, with type, shape and place of each; the data
    (https://github.com/huggingface/safetensors). Raises CheckpointError for a missing or damaged file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        data = torch.from_file(str(path), size=size, dtype=torch.uint8)[8 + length :]  # mapped, not read
        header.pop("__metadata__", None)
        # clone(): the place of a tensor need not be a multiple of its items' size
        return {k: data[slice(*t["data_offsets"])].clone().view(DTYPES[t["dtype"]]).view(t["shape"]) for k, t in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors file ({type(error).__name__}: {str(error).splitlines()[0]})") from None


def is_transposed(name: str) -> bool:
    """Whether their tensor is ours transposed: GPT-2's own code had Conv1D, [inputs, outputs], where torch has Linear."""
    return name.endswith(("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"))


def from_hf(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors under our names and in our layout, float32. The causal masks in old files are left out."""
    tensors = {k.removeprefix("transformer."): v for k, v in tensors.items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}
    return {k: (v.t().contiguous() if is_transposed(k) else v).float() for k, v in tensors.items()}


def check_tensors(folder: Path, config: GPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError unless names and shapes are those of a model of this shape."""
    with torch.device("meta"):
        expected = {k: tuple(v.shape) for k, v in GPT(config).state_dict().items()}
    found = {k: tuple(getattr(v, "shape", ())) for k, v in tensors.items()}
    wrong = [f"{k}: {found.get(k, 'missing')}, expected {expected.get(k, 'no such tensor')}" for k in sorted(expected.keys() | found.keys()) if found.get(k) != expected.get(k)]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(f"the weights in {folder} do not fit their description: {'; '.join(wrong[:4])}{more}")
