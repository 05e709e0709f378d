"""Where a run shows itself besides its own log: TensorBoard, Weights & Biases, and report.html.

Each gets the records of log.jsonl as they are written. None of them is needed, and none may slow or
end a run: what fails is said once and left alone from there on.
"""

import importlib.util
import os
import secrets
import subprocess
import sys
import time
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
    for wanted, package in ((config.tensorboard, "tensorboard"), (config.wandb, "wandb")):
        if wanted and not importlib.util.find_spec(package):
            raise ConfigError(
                f"{package} = {wanted} needs a package that is not installed: pip install {package}"
            )


class Loggers:
    """The loggers that the settings ask for. A logger is (name, write, close); write takes {curve:
    value}, {prompt: text} and a step.
    """

    def __init__(self, config: Config, folder: Path, step: int):
        """Open them to continue after `step`."""
        self.open = []
        for wanted, name, make in (
            (config.tensorboard, "tensorboard", tensorboard),
            (config.wandb, "wandb", wandb),
        ):
            if wanted:
                try:
                    self.open.append((name, *make(config, folder, step)))
                except Exception as error:
                    complain(name, error)

    def write(self, record: dict) -> None:
        """Hand on a record of the log."""
        curves = {CURVES[k]: v for k, v in record.items() if k in CURVES and v is not None}
        texts = {s["prompt"]: s["text"] for s in record.get("samples", [])}
        if not texts and not {"loss", "val_loss"} & record.keys():
            return
        for logger in list(self.open):
            try:
                logger[1](curves, texts, record["step"])
            except Exception as error:  # whatever the packages raise
                complain(logger[0], error)
                self.open.remove(logger)

    def close(self) -> None:
        """Have everything written."""
        for name, _, close in self.open:
            try:
                close()
            except Exception as error:
                complain(name, error)


def complain(name: str, error: Exception) -> None:
    """Say that a logger is done with."""
    print(
        f"\n{name} failed ({type(error).__name__}:"
        f" {str(error).splitlines()[0] if str(error) else ''}); training goes on without it",
        file=sys.stderr,
        flush=True,
    )


def tensorboard(config: Config, folder: Path, step: int):
    """Curves for `tensorboard --logdir`; on resuming, what lies beyond `step` is purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(curves, texts, at):
        for name, value in curves.items():
            writer.add_scalar(name, value, at)
        for prompt, text in texts.items():
            writer.add_text(
                prompt, f"    {prompt}{text}".replace("\n", "\n    "), at
            )  # indented: Markdown leaves it as it is
        writer.flush()  # a killed run has on the disk what it will not write again

    return write, writer.close


def wandb(config: Config, folder: Path, step: int):
    """A Weights & Biases run that goes on under the same id when the run does. Without an account
    at hand it is kept on the disk.
    """
    import wandb as wb

    known = files.read_json(folder / "wandb.json", id=str) or {"id": secrets.token_hex(4)}
    files.write_json(folder / "wandb.json", known)
    options = {
        "project": config.wandb,
        "name": folder.name,
        "id": known["id"],
        "resume": "allow",
        "dir": str(folder),
        "config": asdict(config),
    }
    quiet = wb.Settings(silent=True, console="off", init_timeout=30)
    mode = os.environ.get("WANDB_MODE", "online")
    try:
        if mode == "online" and not wb.login(prompt=False):
            mode = "offline"  # no account on this machine
        run = wb.init(**options, mode=mode, settings=quiet)
    except Exception as error:
        print(f"wandb cannot be reached ({str(error).splitlines()[0]})", file=sys.stderr)
        wb.teardown()  # the id counts as in use otherwise
        mode, run = "offline", wb.init(**options, mode="offline", settings=quiet)
    if mode == "offline":
        print(
            "wandb is offline; to upload later: wandb sync"
            f" {folder}/wandb/offline-run-*-{known['id']}",
            flush=True,
        )
    run.define_metric("step")
    run.define_metric(
        "*", step_metric="step"
    )  # W&B's own counter takes no step twice, and a resumed run repeats some

    def write(curves, texts, at):
        run.log(
            {
                "step": at,
                **curves,
                **{
                    f"samples/{prompt}": wb.Html(
                        f"<pre>{(prompt + text).replace('<', '&lt;')}</pre>"
                    )
                    for prompt, text in texts.items()
                },
            }
        )

    return write, run.finish


class Report:
    """report.html of a run, drawn by tools/report.py in a process of its own, of the lowest
    priority, one at a time.
    """

    def __init__(self, folder: Path, minutes: float):
        """minutes: between two drawings while training goes on, and before the first; 0: none at
        all.
        """
        self.folder, self.wait_s, self.process, self.failed = folder, 60 * minutes, None, False
        self.wanted = bool(minutes) and importlib.util.find_spec("matplotlib") is not None
        self.begun = time.monotonic()

    def refresh(self) -> None:
        """Begin a drawing, unless the last one is recent or still going on."""
        if self.wanted and time.monotonic() > self.begun + self.wait_s and not self.busy:
            self._begin("--background")

    def finish(self, timeout_s: float = 120) -> Path | None:
        """Draw the whole run; returns where, or None where there was nothing to refresh or it
        failed.
        """
        if not self.wanted:
            return None
        self.stop()
        self._begin()
        try:
            if self.process:
                self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
        return (
            self.folder / "report.html"
            if self.process and not self.busy and not self.failed
            else None
        )

    def stop(self) -> None:
        """End a drawing that is going on."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def busy(self) -> bool:
        """Whether a drawing is going on. Says so, once, when one has failed."""
        status = self.process and self.process.poll()
        if status and not self.failed:
            self.failed = True
            print(
                "\nreport.html could not be drawn; why, says: python -m tools.report"
                f" {self.folder}",
                file=sys.stderr,
                flush=True,
            )
        return self.process is not None and status is None

    def _begin(self, *more):
        self.begun = time.monotonic()
        command = [sys.executable, "-m", "tools.report", str(self.folder.absolute()), *more]
        try:  # in a group of its own: Ctrl-C in the terminal is the trainer's. Not in another session: Linux shares the cores out among sessions first
            quiet = subprocess.DEVNULL
            self.process = subprocess.Popen(
                command,
                cwd=Path(__file__).parent.parent,
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                process_group=0,
            )
        except OSError:  # no memory for another process
            self.wanted = False
