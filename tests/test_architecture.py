"""The house: which file may import which. Imports inside functions count like any other."""

import ast
import importlib
from functools import cache
from graphlib import TopologicalSorter

from preparing import ray_engine
from tests.conftest import ROOT

GROUND = {"model", "ops", "tokenizer_bpe", "hardware", "config", "startup"}
ROOMS = {"preparing", "training", "generating"}
SCRIPTS = {"prepare_data", "train", "generate"}
# What each part of the house may import, beside itself. tools and benchmarks may import all of it.
MAY_IMPORT = {
    "formats": GROUND,
    "preparing": GROUND | {"formats"},
    "generating": GROUND | {"formats"},
    "training": GROUND | {"formats", "generating"},
    "tools": GROUND | {"formats"} | ROOMS | SCRIPTS,
    "benchmarks": GROUND | {"formats", "tools"} | ROOMS | SCRIPTS,
    "tests": GROUND | {"formats", "tools", "benchmarks"} | ROOMS | SCRIPTS,
}
MAY_IMPORT |= {part: set() for part in GROUND} | {"model": {"ops"}}
MAY_IMPORT |= {part: GROUND | {"formats"} | ROOMS for part in SCRIPTS}
FILES = [*ROOT.glob("*.py")]
for part in MAY_IMPORT:
    FILES += (ROOT / part).rglob("*.py")
# formats.files -> formats/files.py, formats -> formats/__init__.py
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def part_of(module):
    """The part of the house that a module belongs to: the first word of its name."""
    return module.partition(".")[0]


@cache
def imports(module):
    """The imports of a module, as {module: names that it takes from it}.

    `from formats import files` counts as an import of formats.files.
    """
    found = {}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    found.setdefault(f"{node.module}.{alias.name}", set())
                else:
                    found.setdefault(node.module, set()).add(alias.name)
    return found


def our_imports(module):
    """The imports of a module from the project."""
    return {name: names for name, names in imports(module).items() if part_of(name) in MAY_IMPORT}


def reached_from(module):
    """All modules, of the project or not, that importing one of the project can lead to."""
    found, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += imports(current) if current in MODULES else []
    return found


def test_imports_run_one_way():
    wrong = []
    for module in MODULES:
        allowed = MAY_IMPORT[part_of(module)] | {part_of(module)}
        wrong += [f"{module} imports {n}" for n in our_imports(module) if part_of(n) not in allowed]
    assert wrong == []


def test_no_imports_run_in_a_circle():
    TopologicalSorter({module: our_imports(module) for module in MODULES}).prepare()


def test_what_is_imported_from_the_project_is_there():
    missing = []
    for module in MODULES:
        if part_of(module) == "tests":  # they run
            continue
        for name, names in our_imports(module).items():
            there = vars(importlib.import_module(name))
            missing += [f"{module}: {name}.{n}" for n in names - there.keys()]
    assert missing == []


def test_preparing_and_reports_do_without_torch():
    for module in MODULES:  # a report is drawn beside a run, again and again
        if part_of(module) in ("preparing", "prepare_data") or module == "tools.report":
            assert "torch" not in map(part_of, reached_from(module)), module


def test_the_nodes_of_a_ray_cluster_get_all_code_that_they_import():
    # In the tests of clusters they are on this machine, and would find the rest of it.
    called = ("preparing.ray_engine", "preparing.encoder", "preparing.tokenizers")
    needed = set().union(*map(reached_from, called)) & MODULES.keys()
    sent = {name.removesuffix(".py") for name in ray_engine.CODE}
    assert {part_of(module) for module in needed} == sent
