"""A second place for a run's checkpoints: `mirror`, an address or another disk.

A thread brings each finished save there. A start on a machine that lacks the run fetches it from
there. Training never waits for it, but for a while at the end. What lies there, formats/mirror.py
knows.
"""

import sys
import threading
import time
from pathlib import Path

from config import Config, ConfigError
from formats import mirror, run_folder, run_log
from formats.address import BUGS, AddressError, why
from formats.run_folder import CheckpointError
from training import distributed
from training.errors import RunError

SMALL = (run_log.NAME, "best.json")
WAIT_S = 20 * 60  # for uploads that go on at the end of a run,
FAILING_S = 60  # and for a mirror that fails then
PAUSE_S = 2  # between its tries


def address_of(config: Config) -> str | None:
    """Where a run's copy lies: under the mirror, by the name of its folder."""
    if not config.mirror:
        return None
    return f"{config.mirror.rstrip('/')}/{Path(config.checkpoint_dir).resolve().name}"


# -- at the start ----------------------------------------------------------------------------------


def bring(config: Config) -> None:
    """Fetch the newest step from the mirror, if it is newer than what this disk has; and the best.

    Of several machines each does, one after the other, for they may share the disk. Raises
    ConfigError, CheckpointError and RunError.
    """
    if not config.mirror or config.dry_run:
        return
    for turn in range(distributed.world_size):
        if turn == distributed.rank and distributed.local_rank == 0:
            try_to_fetch(config)
        distributed.gather(0)


def try_to_fetch(config: Config) -> None:
    """Fetch what is newer; a mirror that cannot be reached is none where this disk has the run."""
    address, folder = address_of(config), Path(config.checkpoint_dir)
    try:
        fetch_newer(mirror.Mirror(address), folder, config.resume)
    except (CheckpointError, *BUGS):
        raise
    except AddressError as error:
        raise ConfigError(f"mirror = {config.mirror}: {error}") from None
    except Exception as error:  # whatever the packages raise
        reason = f"mirror {address} cannot be read: {why(error, address)}"
        missing = run_folder.latest(folder)[0] is None
        if missing and isinstance(error, FileNotFoundError):
            raise ConfigError(f"{reason}\nmake it, or correct mirror = {config.mirror}") from None
        if missing:
            raise RunError(
                f"{reason}\n{folder} has no checkpoint, and whether the mirror has one is unknown:"
                " start again later, or leave mirror out to begin a new run"
            ) from None
        print(f"{reason}. The run goes on from {folder}", file=sys.stderr, flush=True)


def fetch_newer(there: mirror.Mirror, folder: Path, resume: str) -> None:
    """Fetch the newest whole step if it is newer than those of `folder`, and the best one."""
    whole = there.whole()
    if whole and resume == "never":
        raise CheckpointError(
            f"{there.address} already holds a run, and resume = never: choose another"
            " checkpoint_dir or mirror, or remove what is there"
        )
    if not whole:
        return
    if run_folder.steps(folder) and there.holds_another(folder):
        raise CheckpointError(another_run(there.address, folder))
    newest, _, problems = run_folder.latest(folder)
    here = run_folder.step_of(newest) if newest else 0
    newer = [step for step in whole if step > here]
    if not newer:
        return
    for problem in problems:
        print(f"passed over: {problem}")
    run_folder.set_aside(folder, here)  # what is damaged
    there.there.get_small(SMALL, folder)
    fetched = fetch_first(there, reversed(newer), folder)
    best = run_folder.best_of(folder)
    if (
        fetched
        and best in whole
        and best < fetched
        and not (folder / mirror.name_of(best)).exists()
    ):
        fetch_first(there, [best], folder)


def fetch_first(there: mirror.Mirror, steps, folder: Path) -> int | None:
    """Fetch the first of `steps` that is not damaged; None where all are. Says what is."""
    for step in steps:
        try:
            there.fetch(step, folder)
            return step
        except CheckpointError as error:
            print(f"passed over in {there.address}: {error}")
    return None


def another_run(address: str, folder: Path) -> str:
    """What to say where a mirror and a folder do not belong together."""
    return (
        f"{address} holds another run than {folder}: their logs begin differently; choose another"
        " mirror or another name for the folder"
    )


# -- while it runs ---------------------------------------------------------------------------------


class Uploader:
    """Brings the saves of a run to its mirror from a thread. Without an address it does nothing.

    uploading: the step folder that is read just now and must stay until it is there.
    """

    def __init__(self, address: str | None, folder: Path, keep_last: int):
        self.address, self.folder, self.keep_last = address, folder, keep_last
        self.uploading = None
        self.held = {}  # {step: its state.json} of what is known to be there
        self.checked = self.ending = False
        self.changed = threading.Condition()
        self.asked = self.answered = 0  # how often the mirror was to be brought up to date
        self.failed_since = None
        self.problem = ""
        self.thread = None

    def wake(self) -> None:
        """Have the mirror brought up to date with the folder, soon."""
        if not self.address or not distributed.is_main:
            return
        with self.changed:
            self.asked += 1
            self.changed.notify_all()
        if not self.thread:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.answered < self.asked)
                asked = self.asked
            try:
                self._update()
                problem = ""
            except Exception as error:  # whatever the packages raise; the next save tries again
                problem = why(error, self.address)
            with self.changed:
                self._answer(asked, problem)
            if problem and self.ending:
                time.sleep(PAUSE_S)

    def _answer(self, asked, problem):
        """Note what came of an update. What fails is tried again with the next save, or the end."""
        self.problem = problem
        if problem and self.ending:
            self.failed_since = self.failed_since or time.monotonic()
            return
        if problem:
            print(
                f"\nmirror {self.address} could not be brought up to date: {problem}. Training goes"
                " on; the next save tries again",
                file=sys.stderr,
                flush=True,
            )
        self.answered = asked
        self.failed_since = None
        self.changed.notify_all()

    def _update(self):
        """Upload what is not there, the newest first; then drop what is to be kept no more."""
        there = mirror.Mirror(self.address)
        if not self.checked:
            if there.whole() and there.holds_another(self.folder):
                raise CheckpointError(another_run(self.address, self.folder))
            self.checked = True
        while folder := self._next(there):
            self._upload(there, folder)
            self._tidy(there)
        self._tidy(there)

    def _tidy(self, there):
        """Write what lies beside the steps, and drop those that are to be kept no more."""
        steps = there.steps()
        whole = [step for step, names in steps.items() if "state.json" in names]
        best = run_folder.best_of(self.folder)
        small = ["config.json", run_log.NAME]
        if best in whole:
            small.append("best.json")
        there.put_small(self.folder, *small)
        here = map(run_folder.step_of, run_folder.steps(self.folder))
        kept = {*whole[-self.keep_last :], best, *here}
        for step, names in steps.items():
            if step not in kept:
                there.drop(step, names)

    def _next(self, there):
        """The newest step folder that the mirror lacks; None if there is none."""
        whole = there.whole()
        for folder in reversed(run_folder.steps(self.folder)):
            step = run_folder.step_of(folder)
            try:
                state = (folder / "state.json").read_bytes()
            except FileNotFoundError:  # deleted just now
                continue
            if step not in whole:
                return folder
            if self.held.get(step) != state and there.state(step) != state:
                return folder
            self.held[step] = state
        return None

    def _upload(self, there, folder):
        self.uploading = folder
        try:
            state = (folder / "state.json").read_bytes()
            there.upload(folder, state)
            self.held[run_folder.step_of(folder)] = state
        except FileNotFoundError:
            if folder.exists():
                raise
        finally:
            self.uploading = None

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the mirror has all: while it uploads, and for a minute while it fails."""
        if not self.address or not distributed.is_main or self.ending:
            return
        self.ending = True
        self.wake()
        deadline = time.monotonic() + WAIT_S
        told = time.monotonic() + 1
        with self.changed:
            while self.answered < self.asked and not self._hopeless(deadline):
                self.changed.wait(0.2)  # short: a signal is to be heard
                if told and time.monotonic() > told:
                    told = None
                    print(f"uploading to {self.address}; Ctrl-C leaves it", flush=True)
            up_to_date = self.answered == self.asked
        if not up_to_date:
            reason = self.problem or "it takes too long"
            print(
                f"\nmirror {self.address} is not up to date: {reason}. {self.folder} is whole; the"
                " same command uploads it",
                file=sys.stderr,
                flush=True,
            )

    def _hopeless(self, deadline):
        now = time.monotonic()
        return now > deadline or now - (self.failed_since or now) > FAILING_S
