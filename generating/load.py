"""A step folder -> a model ready to generate, with its tokenizer."""

from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from formats import run_folder
from formats.run_folder import CheckpointError
from model import GPT
from tokenizer_bpe import Tokenizer


class NoInit(TorchFunctionMode):
    """Modules made under it keep the memory they get as it is: 3 s less for 134M weights that are
    replaced at once.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (
            kwargs["tensor"]
            if getattr(function, "__module__", None) == "torch.nn.init"
            else function(*args, **(kwargs or {}))
        )


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[GPT, Tokenizer, dict]:
    """Model (evaluation mode, weights in `dtype`), tokenizer and state of a step folder. Raises
    CheckpointError for one that is not whole.
    """
    state = run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
    shape = run_folder.read_shape(folder, state)
    try:
        with NoInit():
            model = GPT(shape)
        model.load_state_dict(run_folder.load_tensors(folder / "model.pt"), assign=True)
        if model.config.tie_weights:
            model.lm_head.weight = model.wte.weight
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} does not fit this code's model: {error}") from None
    return model.to(device, dtype).eval(), Tokenizer.load(folder / "tokenizer.json"), state
