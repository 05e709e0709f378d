"""What a study of tools/scaling.py found, as its folder keeps it for those who read it later.

Owns the names there and the fields of scaling.json. Trains nothing, draws nothing.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from formats import files
from tools.scaling_fit import Law
from tools.scaling_plan import Offer

FINDINGS = "scaling.json"
RUN = "run"  # the folder of the recommended run


@dataclass
class Findings:
    """What scaling.json holds, with the folder that it lies in.

    law: without intervals. unique: tokens of the text. runs: the small ones that it was fitted to.
    recommended: an Offer's fields by name.
    """

    folder: Path
    law: Law
    unique: int
    runs: list[dict]
    recommended: dict


def write(folder: Path, law: Law, unique: int, runs: list[dict], recommended: Offer) -> None:
    """Write scaling.json. The arguments: as in Findings."""
    values = {"law": law.to_json(), "unique": unique, "runs": runs}
    files.write_json(folder / FINDINGS, values | {"recommended": asdict(recommended)})


def read(folder: Path) -> Findings | None:
    """The findings of the study in a folder; None where there are none."""
    fields = {"law": dict, "unique": int, "runs": list, "recommended": dict}
    known = files.read_json(folder / FINDINGS, **fields)
    if not known:
        return None
    return Findings(folder, **(known | {"law": Law.from_json(known["law"])}))


def behind(run: Path) -> Findings | None:
    """The findings that recommended a run; None of a run that was never predicted."""
    run = run.resolve()
    return read(run.parent) if run.name == RUN else None
