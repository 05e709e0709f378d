"""What a study of tools/scaling.py found, as its folder keeps it for those who read it later.

Owns the fields of scaling.json and the name of the recommended run's folder. Trains nothing, draws
nothing.
"""

from dataclasses import dataclass
from pathlib import Path

from formats import files
from tools.scaling_fit import Law

FINDINGS = "scaling.json"


@dataclass
class Findings:
    """What scaling.json holds, with the folder that it lies in.

    law: without intervals. unique: tokens of the text. runs: the small ones that it was fitted to.
    recommended: the fields of scaling_plan.Offer by name.
    """

    folder: Path
    law: Law
    unique: int
    runs: list[dict]
    recommended: dict

    @property
    def run(self) -> Path:
        """The folder of the recommended run, whether it is there yet or not."""
        return run_folder(self.folder, self.recommended)


def run_folder(study: Path, offer: dict) -> Path:
    """Where the run of an offer lies: each in a folder of its own, as a run is one promise's."""
    size = offer["size"]
    return study / f"run_{size['n_layer']}x{size['n_embd']}_{offer['steps']}_steps"


def write(folder: Path, law: Law, unique: int, runs: list[dict], recommended: dict) -> None:
    """Write scaling.json. The arguments: as in Findings."""
    values = {"law": law.to_json(), "unique": unique, "runs": runs, "recommended": recommended}
    files.write_json(folder / FINDINGS, values)


def read(folder: Path) -> Findings | None:
    """The findings of the study in a folder; None where there are none."""
    fields = {"law": dict, "unique": int, "runs": list, "recommended": dict}
    known = files.read_json(folder / FINDINGS, **fields)
    if not known:
        return None
    law = Law.from_json(known["law"])
    return Findings(folder, law, known["unique"], known["runs"], known["recommended"])


def behind(run: Path) -> Findings | None:
    """The findings that recommended a run; None of a run that was never predicted."""
    run = run.resolve()
    found = read(run.parent)
    return found if found and found.run == run else None
