"""report.html of a run, drawn by tools/report.py in a process of its own while training goes on.

Knows a folder and a process; whatever becomes of the drawing, training goes on.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path


class ReportProcess:
    """Draws report.html, one at a time, with the lowest priority while training goes on."""

    def __init__(self, folder: Path, minutes: float):
        """minutes: between two drawings while training goes on, and before the first; 0: none."""
        self.folder, self.wait_s, self.process, self.failed = folder, 60 * minutes, None, False
        self.wanted = bool(minutes) and importlib.util.find_spec("matplotlib") is not None
        self.begun = time.monotonic()

    def refresh(self) -> None:
        """Begin a drawing, unless the last one is recent or still going on."""
        if self.wanted and time.monotonic() > self.begun + self.wait_s and not self.busy:
            self._begin("--background")

    def finish(self, timeout_s: float = 120) -> Path | None:
        """Draw the whole run; returns where, or None where nothing was drawn."""
        if not self.wanted:
            return None
        self.stop()
        self._begin()
        try:
            if self.process:
                self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
        if self.process and not self.busy and not self.failed:
            return self.folder / "report.html"
        return None

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
        quiet = subprocess.DEVNULL
        # In a group of its own: Ctrl-C in the terminal is the trainer's. Not in another session:
        # Linux shares the cores out among sessions first.
        try:
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
