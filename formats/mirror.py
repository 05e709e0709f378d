"""A run folder at an address: its steps are listed, uploaded, fetched and dropped.

A step counts when its state.json is there: that file is written last and deleted first. What is
fetched is compared with its checksums before it gets its name. Where the bytes lie, and how they
get there, formats/address.py knows.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from formats import files, run_folder, run_log
from formats.address import BUGS, AddressError, Folder, copy_of, protocol_of, why
from formats.run_folder import FILES, STEP_NAME, CheckpointError

BEGINNING = 100_000  # bytes; a log's first line is shorter


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


class Mirror:
    """A run folder at an address. Raises AddressError; its methods raise what the packages do."""

    def __init__(self, address: str):
        self.there = Folder(address)
        self.address = self.there.address

    def steps(self) -> dict[int, dict[str, int]]:
        """The steps that are there, whole or not, oldest first: {step: {file: bytes}}."""
        found = {}
        for path, size in self.there.list().items():
            folder, _, name = path.partition("/")
            if name and STEP_NAME.fullmatch(folder):
                found.setdefault(int(folder.removeprefix("step_")), {})[name] = size
        return dict(sorted(found.items()))

    def whole(self) -> dict[int, dict[str, int]]:
        """The steps that count."""
        return {step: held for step, held in self.steps().items() if "state.json" in held}

    def state(self, step: int) -> bytes:
        """What the state.json of a step holds."""
        return self.there.read(f"{name_of(step)}/state.json")

    def upload(self, folder: Path, state: bytes) -> None:
        """Write a step folder of this disk, and the log up to it. state: its state.json.

        Raises FileNotFoundError where the folder is deleted on the way.
        """
        with contextlib.suppress(FileNotFoundError):
            self.there.remove(f"{folder.name}/state.json")  # of an earlier save of this step
        for name in FILES:
            self.there.put(folder / name, f"{folder.name}/{name}")
        self.put_small(folder.parent, run_log.NAME)
        if not folder.is_dir():  # its files may have been emptied before they were deleted
            raise FileNotFoundError(folder)
        self.there.write(f"{folder.name}/state.json", state)

    def put_small(self, run: Path, *names: str) -> None:
        """Write those of the files of a run folder that it has."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.there.write(name, (run / name).read_bytes())

    def drop(self, step: int, names: dict[str, int]) -> None:
        """Delete the files `names` of a step."""
        for name in sorted(names, key="state.json".__ne__):
            with contextlib.suppress(FileNotFoundError):
                self.there.remove(f"{name_of(step)}/{name}")

    def fetch(self, step: int, run: Path, names: tuple[str, ...] = FILES) -> Path:
        """Copy files of a step, and its state.json, into a run folder of this disk; its folder.

        It is whole or it does not exist. Raises CheckpointError where what is there is damaged,
        OSError where the disk does not take it.
        """
        final = run / name_of(step)
        partial = run / f".{final.name}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        sizes = self.whole().get(step, {})
        try:
            partial.mkdir(parents=True)
            size = sum(sizes.get(name, 0) for name in names)
            files.check_room(run, size, "choose another disk")
            how_much = f", {size / 1e6:,.1f} MB" if size else ""
            print(f"fetching {self.address}/{final.name}{how_much}", file=sys.stderr, flush=True)
            for name in ("state.json", *names):
                with contextlib.suppress(FileNotFoundError):  # read_state() names what is missing
                    self.there.get(f"{final.name}/{name}", partial / name)
            run_folder.read_state(partial, names)
            for file in partial.iterdir():
                files.sync(file)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            files.sync(run)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def holds_another(self, run: Path) -> bool:
        """Whether what is there began as another run than the one in a folder of this disk."""
        here = next(run_log.iterate(run), None)
        try:
            line = self.there.read(run_log.NAME, BEGINNING).partition(b"\n")[0]
        except FileNotFoundError:
            return False
        return here is not None and next(run_log.lines_of([here])).encode().rstrip() != line


def find(path: str | Path | None) -> Path:
    """The step folder to generate from: as run_folder.find, and of an address a copy on this disk.

    The copy lacks the optimiser's state. Raises CheckpointError.
    """
    if not protocol_of(str(path)):
        return run_folder.find(path)
    with reading(path):
        return _fetched(path.rstrip("/"))


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Have CheckpointError for whatever is raised by reading from an address."""
    try:
        yield
    except (CheckpointError, *BUGS):
        raise
    except AddressError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # whatever the packages raise
        raise CheckpointError(f"{address} cannot be read: {why(error, address)}") from None


def _fetched(address):
    """The copy of what an address names: a step, or the best one of a run, else its newest."""
    folder, _, name = address.rpartition("/")
    wanted = STEP_NAME.fullmatch(name)
    run = Mirror(folder if wanted else address)
    here = copy_of(run.address)
    whole = run.whole()
    if whole:
        run.there.get_small((run_log.NAME, "best.json"), here)
    if wanted:
        step = int(wanted[1])
    elif whole:
        step = run_folder.best_of(here)
        if step not in whole:
            step = max(whole)
    if not whole or step not in whole:
        there = ", ".join(map(name_of, whole)) or "no step that is whole"
        raise CheckpointError(f"no checkpoint at {address}; {run.address} holds {there}")
    folder = here / name_of(step)
    state = folder / "state.json"
    if state.exists() and state.read_bytes() == run.state(step):
        return folder
    return run.fetch(step, here, ("model.pt", "tokenizer.json"))
