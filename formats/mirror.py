"""The mirror of a run folder: a copy at an address, uploaded while training and fetched from.

A step counts only if its state.json exists, which is written last and deleted first. A fetched step
is checked against its checksums before it gets its name. formats/address.py transfers the bytes.
"""

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from formats import files, run_folder
from formats.address import Folder
from formats.files import atomic_folder
from formats.run_folder import FILES, STEP_NAME, CheckpointError, DamagedError, step_name


def address_of(mirror: str, run: Path) -> str:
    """The address of a run's copy: the mirror plus the name of the run's folder."""
    return f"{mirror.rstrip('/')}/{run.resolve().name}"


def steps_in(names: Collection[str]) -> dict[int, bool]:
    """The steps among some file names, oldest first: {step: whether it is complete}."""
    folders = {name.partition("/")[0] for name in names}
    steps = sorted(int(found[1]) for found in map(STEP_NAME.fullmatch, folders) if found)
    return {step: f"{step_name(step)}/state.json" in names for step in steps}


class Mirror:
    """A run folder at an address. The constructor and all methods may raise AddressError."""

    def __init__(self, address: str):
        self.folder = Folder(address)
        self.address = self.folder.address

    def steps(self) -> dict[int, bool]:
        """The steps at the address, oldest first: {step: whether it is complete}."""
        return steps_in(self.folder.list())

    def whole(self) -> list[int]:
        """The complete steps at the address, oldest first."""
        return [step for step, is_whole in self.steps().items() if is_whole]

    def state(self, step: int) -> bytes:
        """The content of a step's state.json."""
        return self.folder.read(f"{step_name(step)}/state.json")

    def data(self) -> dict:
        """Meta.identity() of the data that its newest step was trained on; {} if unknown."""
        whole = self.whole()
        return files.object_in(self.state(whole[-1])).get("data", {}) if whole else {}

    def check_same_run(self, run: Path) -> tuple[dict[int, bool], dict]:
        """Its steps, and its settings with the id under "run"; {} if unknown.

        Raises CheckpointError if it holds another run or other files.
        """
        names = self.folder.list()
        config = self.folder.read("config.json") if "config.json" in names else b""
        if name := run_folder.foreign(names, config.decode("utf-8", "replace")):
            raise CheckpointError(
                f"{self.address} holds {name}, which no run wrote and this one would replace;"
                " choose another mirror, or another name for checkpoint_dir"
            )
        steps, settings = steps_in(names), files.object_in(config)
        here, there = run_folder.run_id(run), run_folder.identity(settings).get("id")
        if here and there and here != there:
            raise CheckpointError(
                f"{self.address} holds another run than {run}; choose another mirror, or another"
                " name for checkpoint_dir"
            )
        return steps, settings

    # -- upload ------------------------------------------------------------------------------------

    def update(self, run: Path) -> None:
        """Upload the steps that the copy lacks, newest first; delete those that the run deleted.

        Raises CheckpointError if the copy belongs to another run.
        """
        there, _ = self.check_same_run(run)
        if (run / "config.json").exists():
            self.folder.put(run / "config.json", "config.json")  # first: identifies the run
        here = {run_folder.step_of(folder): folder for folder in run_folder.steps(run)}
        for step, folder in sorted(here.items(), reverse=True):
            # The copy may hold an older save of this step, if the run went back and repeated it.
            state = (folder / "state.json").read_bytes()
            if not there.get(step) or self.state(step) != state:
                self.upload(folder)
        for name in (run_folder.LOG, "best.json"):
            if (run / name).exists():
                self.folder.put(run / name, name)
        for step in there:
            if step not in here and step < max(here, default=0):
                self.remove(step)

    def upload(self, folder: Path) -> None:
        """Upload a step and the log, with state.json last."""
        self.remove(run_folder.step_of(folder))  # an older save of the same step
        for name in FILES:
            self.folder.put(folder / name, f"{folder.name}/{name}")
        self.folder.put(folder.parent / run_folder.LOG, run_folder.LOG)
        self.folder.put(folder / "state.json", f"{folder.name}/state.json")

    def remove(self, step: int) -> None:
        """Delete a step if it exists, state.json first."""
        for name in (f"{step_name(step)}/state.json", step_name(step)):
            with contextlib.suppress(FileNotFoundError):
                self.folder.remove(name)

    # -- fetch -------------------------------------------------------------------------------------

    def fetch_newer(self, run: Path) -> list[str]:
        """If the copy has a newer complete step than the run on this disk, fetch it and the best.

        Returns a sentence for each damaged step. Raises CheckpointError if the copy belongs to
        another run, or if a later version saved the step.
        """
        there, settings = self.check_same_run(run)
        whole = [step for step, is_whole in there.items() if is_whole]
        id_there = run_folder.identity(settings).get("id")
        if id_there and not run_folder.run_id(run):
            run.mkdir(parents=True, exist_ok=True)
            own = files.read_json(run / "config.json") or settings
            run_folder.write_config(run, own, id_there)
        newest, _, problems = run_folder.latest(run)
        here = run_folder.step_of(newest) if newest else -1
        newer = [step for step in whole if step > here]
        if not newer:
            return []
        run_folder.set_aside(run, here)
        self.folder.get((run_folder.LOG, "best.json"), run)
        self._fetch_first(reversed(newer), run, problems)
        best = run_folder.best_of(run)
        if best in whole and not (run / step_name(best)).exists():
            self._fetch_first([best], run, problems)
        return problems

    def _fetch_first(self, steps: Iterable[int], run, problems):
        """Fetch the first of these steps that is intact; report the others in `problems`."""
        for step in steps:
            try:
                self.fetch(step, run)
                return
            except DamagedError as error:
                problems.append(f"in {self.address}: {error}")

    def fetch(self, step: int, run: Path, names: tuple[str, ...] = FILES) -> Path:
        """Copy state.json and `names` of a step into a local run folder; returns the step's folder.

        Writes the folder whole or not at all. Raises CheckpointError if the step is damaged,
        OSError if writing fails.
        """
        final = run / step_name(step)
        there = Folder(f"{self.address}/{final.name}")
        wanted = ("state.json", *names)
        with atomic_folder(final) as partial:
            sizes = {name: size for name, size in there.list().items() if name in wanted}
            there.get_large(sizes, partial)
            run_folder.read_state(partial, names)
        return final


def fetch_to_read(address: str, here: Path) -> Path:
    """Copy a run's best step, else its newest, without the optimizer state; returns its folder.

    here: the local_copy of the address. Raises CheckpointError, AddressError, and OSError if
    writing fails.
    """
    mirror = Mirror(address)
    mirror.folder.get((run_folder.LOG, "best.json"), here)
    whole = mirror.whole()
    if not whole:
        hint = run_folder.other_format(mirror.folder.list()) or "give the address of a run"
        raise CheckpointError(f"no checkpoint at {address}; {hint}")
    best = run_folder.best_of(here)
    step = best if best in whole else whole[-1]
    copy = here / step_name(step) / "state.json"
    if not copy.exists() or copy.read_bytes() != mirror.state(step):
        mirror.fetch(step, here, ("model.pt", "tokenizer.json"))
        run_folder.rotate(here, 2, step)  # another reader may have the one before it
    return copy.parent
