"""More loggers than log.jsonl: TensorBoard and Weights & Biases.

Each gets the records of log.jsonl as they are written. One that fails is reported once and left
alone from there on; training goes on.
"""

import contextlib
import importlib.util
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from config import Config, ConfigError
from formats import files
from formats.address import recorded

CURVES = {
    "loss": "loss/training",
    "val_loss": "loss/validation",
    "bits_per_byte": "loss/bits_per_byte",
    "lr": "training/learning_rate",
    "grad_norm": "training/gradient_norm",
    "epoch": "training/epoch",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "cost": "speed/cost",
    "bad_steps": "training/skipped_steps",
}


def check_installed(config: Config) -> None:
    """Raises ConfigError where a setting asks for a package that is not installed."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted and not importlib.util.find_spec(package):
            raise ConfigError(
                f"{package} = {wanted} needs a package that is not installed: pip install {package}"
            )


class Loggers:
    """The loggers that the settings ask for, opened to continue after `step`."""

    def __init__(self, config: Config, folder: Path, step: int):
        self.open = {}
        if config.tensorboard:
            with self.tolerated("tensorboard"):
                self.open["tensorboard"] = TensorBoard(folder, step)
        if config.wandb:
            with self.tolerated("wandb"):
                self.open["wandb"] = WeightsAndBiases(config, folder)

    def write(self, record: dict) -> None:
        """Hand on a record of the log, if it holds curves or samples."""
        curves = {CURVES[k]: v for k, v in record.items() if k in CURVES and v is not None}
        samples = {s["prompt"]: s["text"] for s in record.get("samples", [])}
        if not samples and not {"loss", "val_loss"} & record.keys():
            return
        for name, logger in list(self.open.items()):
            with self.tolerated(name):
                logger.write(curves, samples, record["step"])

    def close(self) -> None:
        for name, logger in list(self.open.items()):
            with self.tolerated(name):
                logger.close()

    @contextlib.contextmanager
    def tolerated(self, name: str):
        """Whatever a package raises under this ends its use alone."""
        try:
            yield
        except Exception as error:
            self.open.pop(name, None)
            why = f"{type(error).__name__}: {files.in_words(error)}"
            message = f"\n{name} failed ({why}); training goes on without it"
            print(message, file=sys.stderr, flush=True)


class TensorBoard:
    """Curves for `tensorboard --logdir`; what an earlier start wrote after `step` is purged."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        purge = step + 1 if step else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, curves: dict[str, float], samples: dict[str, str], step: int) -> None:
        for name, value in curves.items():
            self.writer.add_scalar(name, value, step)
        for prompt, text in samples.items():
            indented = f"{prompt}{text}".replace("\n", "\n    ")  # Markdown shows it unchanged
            self.writer.add_text(prompt, f"    {indented}", step)
        self.writer.flush()  # a killed run does not log these steps again

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A W&B run that continues under its id; without a network or an account, on disk."""

    def __init__(self, config: Config, folder: Path):
        import wandb

        self.wandb = wandb
        known = files.read_json(folder / "wandb.json", id=str) or {"id": secrets.token_hex(4)}
        files.write_json(folder / "wandb.json", known)
        options = {
            "project": config.wandb,
            "name": folder.name,
            "id": known["id"],
            "resume": "allow",
            "dir": str(folder),
            "config": recorded(asdict(config)),
            "settings": wandb.Settings(silent=True, console="off", init_timeout=30),
        }
        mode = os.environ.get("WANDB_MODE", "online")
        try:
            if mode == "online" and not wandb.login(prompt=False):
                mode = "offline"  # no account on this machine
            self.run = wandb.init(**options, mode=mode)
        except Exception as error:
            print(f"wandb cannot be reached ({files.in_words(error)})", file=sys.stderr)
            wandb.teardown()  # the id counts as in use otherwise
            mode = "offline"
            self.run = wandb.init(**options, mode=mode)
        if mode == "offline":
            where = f"{quote(folder.as_posix())}/wandb/offline-run-*-{known['id']}"
            print(f"wandb is offline; to upload later: wandb sync {where}", flush=True)
        self.run.define_metric("step")
        # W&B's own counter takes no step twice, and a resumed run repeats some.
        self.run.define_metric("*", step_metric="step")

    def write(self, curves: dict[str, float], samples: dict[str, str], step: int) -> None:
        values = {"step": step, **curves}
        for prompt, text in samples.items():
            escaped = (prompt + text).replace("<", "&lt;")
            values[f"samples/{prompt}"] = self.wandb.Html(f"<pre>{escaped}</pre>")
        self.run.log(values)

    def close(self) -> None:
        self.run.finish()
