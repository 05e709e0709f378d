"""A checkout of nanoGPT made ready for comparison: a copy with our tokens, and its model.

Changes nothing in the checkout itself.
"""

import importlib.util
import pickle
import shutil
import sys
from pathlib import Path


def copy_checkout(
    path: str | Path, copy: Path, data_set: str, data_dir: str | Path, vocab_size: int
) -> None:
    """Copy a checkout, with the tokens of a prepared folder as its data set of that name."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / data_set
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to((Path(data_dir) / name).absolute())
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": vocab_size}, file)


def replace_in_script(copy: Path, old: str, new: str) -> None:
    """Replace a passage of a copy's train.py, which has to be there."""
    script = copy / "train.py"
    text = script.read_text()
    assert old in text, f"this nanoGPT's train.py lacks: {old}"
    script.write_text(text.replace(old, new))


def model_module(checkout: str | Path):
    """A checkout's model.py as a module, under a name of its own beside our model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
