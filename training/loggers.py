"""More loggers than log.jsonl: TensorBoard and Weights & Biases.

Each gets the records of log.jsonl as they are written. One that fails is reported once and is not
used from there on; training continues.
"""

import contextlib
import importlib.util
from pathlib import Path

from config import Config, ConfigError
from formats import files
from training import terminal

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
        self.open = {}  # {package: (write(curves, step), close())}
        for package, open_logger in (("tensorboard", open_tensorboard), ("wandb", open_wandb)):
            if getattr(config, package):
                with self.tolerated(package):
                    self.open[package] = open_logger(config, folder, step)

    def write(self, record: dict) -> None:
        """Hand on the curves of a record of the log."""
        if not {"loss", "val_loss"} & record.keys():
            return
        curves = {CURVES[k]: v for k, v in record.items() if k in CURVES and v is not None}
        for package, (write, _) in list(self.open.items()):
            with self.tolerated(package):
                write(curves, record["step"])

    def close(self) -> None:
        for package, (_, close) in list(self.open.items()):
            with self.tolerated(package):
                close()

    @contextlib.contextmanager
    def tolerated(self, package: str):
        """Whatever a package raises in this context ends its use alone."""
        try:
            yield
        except Exception as error:
            self.open.pop(package, None)
            why = f"{type(error).__name__}: {files.error_message(error)}"
            terminal.warn(f"{package} failed ({why}); training continues without it")


def open_tensorboard(config: Config, folder: Path, step: int):
    """Curves for `tensorboard --logdir`; what an earlier start wrote after `step` is purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(curves, step):
        for name, value in curves.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run does not log these steps again

    return write, writer.close


def open_wandb(config: Config, folder: Path, step: int):
    """A W&B run that continues under the name of its folder; WANDB_MODE=offline works too."""
    import wandb

    id_file = folder / "wandb_id"
    run = wandb.init(
        project=config.wandb,
        name=folder.name,
        id=id_file.read_text() if id_file.exists() else None,
        resume="allow",
        dir=str(folder),
        config=config.recorded(),
        settings=wandb.Settings(silent=True, console="off", init_timeout=30),
    )
    files.write_text(id_file, run.id)
    # W&B's own counter takes no step twice, and a resumed run repeats some.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda curves, step: run.log({"step": step, **curves}), run.finish
