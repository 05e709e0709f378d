"""The house: which file may import which. Imports inside functions count like any other."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

from preparing import engines
from tests.conftest import ROOT

GROUND = {"model", "tokenizer_bpe", "hardware", "processors", "config", "command_line", "startup"}
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
MAY_IMPORT |= {part: set() for part in GROUND}
MAY_IMPORT |= {part: {"command_line"} for part in ("config", "startup", "tokenizer_bpe")}
MAY_IMPORT |= {"hardware": {"processors", "command_line"}}
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
    """The modules of the project that one imports, also in its functions.

    `from formats import files` counts as an import of formats.files.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return {name for name in found if part_of(name) in MAY_IMPORT}


def test_imports_run_one_way():
    wrong = []
    for module in MODULES:
        allowed = MAY_IMPORT[part_of(module)] | {part_of(module)}
        wrong += [f"{module} imports {n}" for n in imports(module) if part_of(n) not in allowed]
    assert wrong == []


def test_no_imports_run_in_a_circle():
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()


def test_every_module_can_be_imported():
    for module in MODULES:
        if part_of(module) != "tests" and module != "tools.startup":  # it replaces startup
            importlib.import_module(module)


def python(code, folder):
    """Run code in a folder, with what lies there alone."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def test_preparing_and_reports_do_without_torch():
    code = "import sys; sys.modules['torch'] = None; import prepare_data, tools.report"
    assert python(code, ROOT) == ""


def test_the_nodes_of_a_ray_cluster_get_all_code_that_they_import(tmp_path):
    # In the tests of clusters they are on this machine, and would find the rest of it.
    for name in engines.CODE:
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import preparing.engines, preparing.encoder, preparing.tokenizers"
    assert python(code, tmp_path) == ""
