"""Where a run shows itself besides its own log: TensorBoard and Weights & Biases.

Each gets the records of log.jsonl as they are written. Neither is needed, and neither may slow or
end a run: what fails is said once and left alone from there on.
"""

import importlib.util
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

from config import Config, ConfigError
from formats import files

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
    """Raises ConfigError where a setting asks for a package that is not there."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted and not importlib.util.find_spec(package):
            raise ConfigError(
                f"{package} = {wanted} needs a package that is not installed: pip install {package}"
            )


class Loggers:
    """The loggers that the settings ask for, opened to continue after `step`."""

    def __init__(self, config: Config, folder: Path, step: int):
        self.open = {}
        kinds = {}
        if config.tensorboard:
            kinds["tensorboard"] = TensorBoard
        if config.wandb:
            kinds["wandb"] = WeightsAndBiases
        for name, kind in kinds.items():
            try:
                self.open[name] = kind(config, folder, step)
            except Exception as error:  # whatever the packages raise
                complain(name, error)

    def write(self, record: dict) -> None:
        """Hand on a record of the log."""
        curves = {CURVES[k]: v for k, v in record.items() if k in CURVES and v is not None}
        texts = {s["prompt"]: s["text"] for s in record.get("samples", [])}
        if not texts and not {"loss", "val_loss"} & record.keys():
            return
        for name, logger in list(self.open.items()):
            try:
                logger.write(curves, texts, record["step"])
            except Exception as error:
                complain(name, error)
                del self.open[name]

    def close(self) -> None:
        """Have everything written."""
        for name, logger in self.open.items():
            try:
                logger.close()
            except Exception as error:
                complain(name, error)


def complain(name: str, error: Exception) -> None:
    """Say that a logger is done with."""
    why = files.first_line(error)
    print(
        f"\n{name} failed ({type(error).__name__}: {why}); training goes on without it",
        file=sys.stderr,
        flush=True,
    )


class TensorBoard:
    """Curves for `tensorboard --logdir`; on resuming, what lies beyond `step` is purged."""

    def __init__(self, config: Config, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        purge = step + 1 if step else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, curves: dict[str, float], texts: dict[str, str], step: int) -> None:
        """Values by curve, and answers by prompt."""
        for name, value in curves.items():
            self.writer.add_scalar(name, value, step)
        for prompt, text in texts.items():
            indented = f"{prompt}{text}".replace("\n", "\n    ")  # Markdown leaves it as it is
            self.writer.add_text(prompt, f"    {indented}", step)
        self.writer.flush()  # a killed run has on the disk what it will not write again

    def close(self) -> None:
        """Have everything written."""
        self.writer.close()


class WeightsAndBiases:
    """A W&B run that goes on under its id when the run does; without an account, on disk."""

    def __init__(self, config: Config, folder: Path, step: int):
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
            "config": asdict(config),
            "settings": wandb.Settings(silent=True, console="off", init_timeout=30),
        }
        mode = os.environ.get("WANDB_MODE", "online")
        try:
            if mode == "online" and not wandb.login(prompt=False):
                mode = "offline"  # no account on this machine
            self.run = wandb.init(**options, mode=mode)
        except Exception as error:
            print(f"wandb cannot be reached ({files.first_line(error)})", file=sys.stderr)
            wandb.teardown()  # the id counts as in use otherwise
            mode = "offline"
            self.run = wandb.init(**options, mode=mode)
        if mode == "offline":
            where = f"{folder}/wandb/offline-run-*-{known['id']}"
            print(f"wandb is offline; to upload later: wandb sync {where}", flush=True)
        self.run.define_metric("step")
        # W&B's own counter takes no step twice, and a resumed run repeats some.
        self.run.define_metric("*", step_metric="step")

    def write(self, curves: dict[str, float], texts: dict[str, str], step: int) -> None:
        """Values by curve, and answers by prompt."""
        values = {"step": step, **curves}
        for prompt, text in texts.items():
            escaped = (prompt + text).replace("<", "&lt;")
            values[f"samples/{prompt}"] = self.wandb.Html(f"<pre>{escaped}</pre>")
        self.run.log(values)

    def close(self) -> None:
        """Have everything written."""
        self.run.finish()
