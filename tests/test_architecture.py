"""The house: which file may import which, and the rules of style that a program can check.

Reads the sources with the standard library's ast; imports and runs none of them. Imports inside
functions count like any other.
"""

import ast
import re
from functools import cache

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


def sources():
    """The Python files of the project, as paths from its root."""
    found = list(ROOT.glob("*.py"))
    for part in MAY_IMPORT:
        found += (ROOT / part).rglob("*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@cache
def read(path):
    """The text of a file."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path):
    """The syntax tree of a file."""
    return ast.parse(read(path), path)


FILES = sources()
# formats.files -> formats/files.py, formats -> formats/__init__.py
MODULES = {
    path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES
}


def part_of(module):
    """The part of the house that a module belongs to: the first word of its name."""
    return module.partition(".")[0]


@cache
def imports(module):
    """The imports of a module from the project, as {module: names that it takes from it}.

    `from formats import files` counts as an import of formats.files.
    """
    found = {}
    for node in ast.walk(parse(MODULES[module])):
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
    """The packages that a module imports from outside of the project."""
    return {name: names for name, names in imports(module).items() if part_of(name) in MAY_IMPORT}


def defined(module):
    """The names that a module assigns, defines or imports outside of functions."""
    names, waiting = set(), [parse(MODULES[module])]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return names


def reached_from(module):
    """All modules, of the project or not, that importing one of the project can lead to."""
    found, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += imports(current) if current in MODULES else []
    return found


# -- imports ---------------------------------------------------------------------------------------


def test_imports_run_one_way():
    wrong = []
    for module in MODULES:
        allowed = MAY_IMPORT[part_of(module)] | {part_of(module)}
        wrong += [f"{module} imports {n}" for n in our_imports(module) if part_of(n) not in allowed]
    assert wrong == []


def test_what_is_imported_from_the_project_is_there():
    missing = []
    for module in MODULES:
        for name, names in our_imports(module).items():
            there = defined(name) if name in MODULES else set()
            missing += [f"{module}: {name}.{n}" for n in names - there]
            if name not in MODULES:
                missing.append(f"{module}: {name}")
    assert missing == []


def test_no_imports_run_in_a_circle():
    graph = {module: our_imports(module).keys() for module in MODULES}
    while graph:  # take away what imports nothing more of the rest
        free = [module for module, needed in graph.items() if not needed & graph.keys()]
        assert free, f"there is a circle among {sorted(graph)}"
        for module in free:
            del graph[module]


def test_preparing_and_reports_do_without_torch():
    for module in MODULES:  # a report is drawn beside a run, again and again
        if part_of(module) in ("preparing", "prepare_data") or module == "tools.report":
            assert "torch" not in map(part_of, reached_from(module)), module


def test_the_nodes_of_a_ray_cluster_get_all_code_that_they_import():
    # In the tests of clusters they are on this machine, and would find the rest of it.
    sent = set(
        re.findall(
            r'"([\w.]+)"',
            re.search(r"^CODE = .*", read("preparing/ray_engine.py"), re.MULTILINE)[0],
        )
    )
    called = ("preparing.ray_engine", "preparing.encoder", "preparing.tokenizers")
    needed = set().union(*map(reached_from, called)) & MODULES.keys()
    assert {part_of(module) for module in needed} == {name.removesuffix(".py") for name in sent}


# -- style -----------------------------------------------------------------------------------------


def test_no_conditional_expression_lies_inside_another():
    wrong = []
    for path in FILES:
        for node in ast.walk(parse(path)):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.IfExp)]
            if isinstance(node, ast.IfExp) and len(inner) > 1:
                wrong.append(f"{path}:{node.lineno}")
    assert wrong == []
