"""Loggers besides log.jsonl: TensorBoard and Weights & Biases.

Each gets the records of log.jsonl as they are written. If one fails, this is reported once, and
training continues without it.
"""

import contextlib
import os
from pathlib import Path

from config import Config
from formats import files
from formats.run_folder import ROOT
from training import warn

FINISH_S = "120"  # seconds that the end of a run waits for W&B's uploads; W&B alone waits forever


class Loggers:
    """The loggers that the settings enable, opened to continue a run after `step`."""

    def __init__(self, config: Config, folder: Path, step: int, run_id: str):
        self.open = {}  # {package: (write(numbers, step), close())}
        for package, open_logger in (("tensorboard", open_tensorboard), ("wandb", open_wandb)):
            if getattr(config, package):
                with self.tolerated(package):
                    self.open[package] = open_logger(config, folder, step, run_id)

    def write(self, record: dict) -> None:
        """Log the numbers of a record, if it has a loss, under their names in log.jsonl."""
        if not {"loss", "val_loss"} & record.keys():
            return
        numbers = {name: value for name, value in record.items() if value is not None}
        step = numbers.pop("step")
        for package, (write, _) in list(self.open.items()):
            with self.tolerated(package):
                write(numbers, step)

    def close(self) -> None:
        for package, (_, close) in list(self.open.items()):
            with self.tolerated(package):
                close()

    @contextlib.contextmanager
    def tolerated(self, package: str):
        """Catch whatever the package raises in this context, and stop using it."""
        try:
            yield
        except Exception as error:
            self.open.pop(package, None)
            why = f"{type(error).__name__}: {files.error_message(error)}"
            warn(f"{package} failed ({why}); training continues without it")


def open_tensorboard(config: Config, folder: Path, step: int, run_id: str):
    """Write curves for `tensorboard --logdir`; purges what an earlier start wrote after `step`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(numbers, step):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run may not log these steps again

    return write, writer.close


def open_wandb(config: Config, folder: Path, step: int, run_id: str):
    """A W&B run that continues under the run's id; WANDB_MODE=offline works too."""
    # As a variable, since older versions reject settings that they do not know.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", FINISH_S)
    import wandb

    entity, _, project = config.wandb.rpartition("/")
    other = folder / "wandb_id"  # the user's, or of a run that began before runs had ids
    run = wandb.init(
        entity=entity or None,
        project=project,
        name=display_name(folder),
        id=other.read_text().strip() if other.exists() else run_id,
        resume="allow",
        dir=str(folder),
        config=config.recorded(),
        settings=wandb.Settings(silent=True, console="off", init_timeout=30),
    )
    # W&B's own step counter rejects repeated steps, and a resumed run repeats some.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda numbers, step: run.log({"step": step, **numbers}), run.finish


def display_name(folder: Path) -> str:
    """The name of a run: its folder's path below checkpoints/, else from the current directory."""
    whole = folder.resolve()
    for root in (ROOT.resolve(), Path.cwd()):
        if whole.is_relative_to(root) and whole != root:
            return whole.relative_to(root).as_posix()
    return whole.as_posix()
