"""A run folder at an address: kept up to date with the one on this disk, and fetched from.

A step counts once its state.json is there: that file is written last and deleted first. A step
that is fetched is compared with its checksums before it gets its name. How bytes get there and
back: formats/address.py.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from formats import run_folder, run_log
from formats.address import Folder, copy_of, protocol_of
from formats.files import whole_folder
from formats.run_folder import FILES, STEP_NAME, CheckpointError, step_name

BEGINNING = 100_000  # bytes; a log's first line is shorter


def address_of(mirror: str, run: Path) -> str:
    """Where the copy of a run folder is: under the mirror, by the name of the folder."""
    return f"{mirror.rstrip('/')}/{run.resolve().name}"


class Mirror:
    """A run folder at an address. Raises AddressError, and so do its methods.

    uploading: the step folder of this disk that is being uploaded, and must not be deleted.
    """

    def __init__(self, address: str):
        self.folder = Folder(address)
        self.address = self.folder.address
        self.uploading = None

    def steps(self) -> dict[int, bool]:
        """The steps that are there, oldest first, and whether each is whole."""
        found = {}
        for path in self.folder.list():
            folder, _, name = path.partition("/")
            if name and STEP_NAME.fullmatch(folder):
                step = int(folder.removeprefix("step_"))
                found[step] = found.get(step, False) or name == "state.json"
        return dict(sorted(found.items()))

    def whole(self) -> list[int]:
        """The steps that count, oldest first."""
        return [step for step, is_whole in self.steps().items() if is_whole]

    def state(self, step: int) -> bytes:
        return self.folder.read(f"{step_name(step)}/state.json")

    def check_same_run(self, run: Path) -> None:
        """Raises CheckpointError where this is the copy of another run: their logs differ then."""
        with contextlib.suppress(FileNotFoundError):
            there = self.folder.read(run_log.NAME, BEGINNING).partition(b"\n")[0]
            with open(run / run_log.NAME, "rb") as log:
                here = log.readline().rstrip()
            if here != there:
                raise CheckpointError(
                    f"{self.address} holds another run than {run}: their logs begin differently;"
                    " choose another mirror, or another name for the folder"
                )

    # -- upload ------------------------------------------------------------------------------------

    def update(self, run: Path, keep_last: int) -> None:
        """Upload what is lacking of a run, the newest step first; delete what it keeps no more.

        Raises CheckpointError where the copy is of another run.
        """
        there = self.steps()
        if any(there.values()):
            self.check_same_run(run)
        while folder := self._newest_lacking(run, there):
            there[run_folder.step_of(folder)] = self._upload(folder)
            self._tidy(run, keep_last, there)
        self._tidy(run, keep_last, there)

    def _newest_lacking(self, run, there):
        """The newest step folder of a run that is not there as it is here; None if there is none.

        A step may be there from before the run went back, and came to it again.
        """
        for folder in reversed(run_folder.steps(run)):
            step = run_folder.step_of(folder)
            with contextlib.suppress(FileNotFoundError):  # deleted just now
                state = (folder / "state.json").read_bytes()
                if not there.get(step) or self.state(step) != state:
                    return folder
        return None

    def _upload(self, folder):
        """Write a step, and the log up to it. False if it was deleted here meanwhile."""
        self.uploading = folder
        try:
            state = (folder / "state.json").read_bytes()
            with contextlib.suppress(FileNotFoundError):
                self.folder.remove(f"{folder.name}/state.json")  # of an earlier save of this step
            for name in FILES:
                self.folder.put(folder / name, f"{folder.name}/{name}")
            self._write_small(folder.parent, run_log.NAME)
            if not folder.is_dir():  # its files may have been emptied before they were deleted
                raise FileNotFoundError(folder)
            self.folder.write(f"{folder.name}/state.json", state)
            return True
        except FileNotFoundError:
            if folder.exists():
                raise
            return False  # it was deleted just before `uploading` named it
        finally:
            self.uploading = None

    def _write_small(self, run, *names):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.folder.write(name, (run / name).read_bytes())

    def _tidy(self, run, keep_last, there):
        """Write the files that are no step's, and delete the steps that are kept no more."""
        self._write_small(run, "config.json", run_log.NAME)
        whole = sorted(step for step in there if there[step])
        best = run_folder.best_of(run)
        if best in whole:
            self._write_small(run, "best.json")
        here = map(run_folder.step_of, run_folder.steps(run))
        for step in there.keys() - {*whole[-keep_last:], best, *here}:
            for name in (f"{step_name(step)}/state.json", step_name(step)):
                with contextlib.suppress(FileNotFoundError):
                    self.folder.remove(name)
            del there[step]

    # -- fetch -------------------------------------------------------------------------------------

    def download_newer(self, run: Path) -> tuple[Path | None, dict, list[str]]:
        """The newest whole step of a run, here or there, as run_folder.latest returns it.

        If it is there, it is fetched, and the best one with it. Raises CheckpointError where the
        copy is of another run.
        """
        whole = self.whole()
        if whole and run_folder.steps(run):
            self.check_same_run(run)
        newest, state, problems = run_folder.latest(run)
        here = run_folder.step_of(newest) if newest else -1
        newer = [step for step in whole if step > here]
        if not newer:
            return newest, state, problems
        run_folder.set_aside(run, here)
        self.folder.get_small((run_log.NAME, "best.json"), run)
        fetched = self._fetch_first(reversed(newer), run, problems)
        if not fetched:
            return newest, state, problems
        best = run_folder.best_of(run)
        missing = best in whole and not (run / step_name(best)).exists()
        if missing and best < run_folder.step_of(fetched):
            self._fetch_first([best], run, problems)
        return fetched, run_folder.read_state(fetched, ()), problems

    def _fetch_first(self, steps: Iterable[int], run, problems):
        """Fetch the first of these steps that is not damaged; its folder, None if all are."""
        for step in steps:
            try:
                return self.fetch(step, run)
            except CheckpointError as error:
                problems.append(f"in {self.address}: {error}")
        return None

    def fetch(self, step: int, run: Path, names: tuple[str, ...] = FILES) -> Path:
        """Copy files of a step, and its state.json, into a run folder of this disk; its folder.

        It is whole or it does not exist. Raises CheckpointError where what is there is damaged,
        OSError where the disk does not take it.
        """
        final = run / step_name(step)
        there = Folder(f"{self.address}/{final.name}")
        wanted = ("state.json", *names)
        with whole_folder(final) as partial:
            sizes = there.list()
            there.get({name: sizes[name] for name in sizes if name in wanted}, partial)
            run_folder.read_state(partial, names)
        return final


def find(path: str | Path | None) -> Path:
    """The step folder to generate from: as run_folder.find, and of an address a copy on this disk.

    The copy lacks the optimiser's state. Raises CheckpointError, AddressError, and OSError where
    the disk does not take the copy.
    """
    address = str(path).rstrip("/")
    if not protocol_of(address):
        return run_folder.find(path)
    parent, _, name = address.rpartition("/")
    wanted = STEP_NAME.fullmatch(name)
    mirror = Mirror(parent if wanted else address)
    with copy_of(mirror.folder) as here:
        whole = mirror.whole()
        if whole:
            mirror.folder.get_small((run_log.NAME, "best.json"), here)
        best = run_folder.best_of(here)
        step = best if best in whole else max(whole, default=None)
        if wanted:
            step = int(wanted[1])
        if step not in whole:
            there = ", ".join(map(step_name, whole)) or "no step that is whole"
            raise CheckpointError(f"no checkpoint at {address}; {mirror.address} holds {there}")
        folder = here / step_name(step)
        state = folder / "state.json"
        if state.exists() and state.read_bytes() == mirror.state(step):
            return folder
        return mirror.fetch(step, here, ("model.pt", "tokenizer.json"))
