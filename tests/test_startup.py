"""startup.py: what holds before a script has imported what it needs."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import startup
from tests.conftest import ROOT, fails_clearly, ok, run_script, train_command

SCRIPTS = ["train.py", "generate.py", "prepare_data.py"]
posix = pytest.mark.skipif(os.name == "nt", reason="needs signals, limits, terminals or bash")


@posix
@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, signal.SIGINT) for name in SCRIPTS), ("tools.evaluate", signal.SIGTERM)],
)
def test_a_signal_during_imports_ends_it_quietly(name, number):
    command = [name] if name.endswith(".py") else ["-m", name]
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command, "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test suite in the background of a shell has it ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:  # a line for each module, once it is imported
        if line.endswith("startup\n"):
            break
    process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert not out
    assert "Traceback" not in err


@pytest.mark.parametrize("name", SCRIPTS)
def test_missing_packages_are_named_with_what_installs_them(name):
    result = run_script("-S", name)  # without site-packages
    fails_clearly(result, f"{name}: ", "has no numpy, tiktoken", "pip install -r requirements.txt")


ON_FULL_DISK = """
import os, resource, runpy, sys
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@posix
def test_a_script_starts_where_no_disk_has_room(char_data, tmp_path):
    command = train_command(char_data, tmp_path / "run", "--dry_run")
    ok(run_script("-c", ON_FULL_DISK, *command, PYTHONDONTWRITEBYTECODE="1"))


CONTAINER = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork")


def has_containers() -> bool:
    """True if this user may start a process as the first one of a container."""
    if not shutil.which("unshare"):
        return False
    return not subprocess.run([*CONTAINER, "true"], capture_output=True).returncode


@pytest.mark.skipif(not has_containers(), reason="needs unshare, and the right to use it")
def test_sigterm_ends_the_first_process_of_a_container():
    """Linux withholds a signal from it that it has no handler for: docker stop took 10 seconds."""
    code = "import os, startup; startup.begin(); startup.end(); os.kill(1, 15); print(os.getpid())"
    result = subprocess.run([*CONTAINER, sys.executable, "-c", code], cwd=ROOT, text=True)
    assert result.returncode == 143


@pytest.mark.skipif(not has_containers(), reason="needs unshare, and the right to use it")
def test_a_script_starts_where_the_disk_is_read_only(char_data, tmp_path):
    disks = 'mount -t tmpfs none /dev/shm && mount -o remount,bind,ro / && exec "$@"'
    variables = ("-u", "TMPDIR", "-u", "TORCHINDUCTOR_CACHE_DIR", "LOGNAME=somebody")
    command = ["env", *variables, sys.executable]
    command += train_command(char_data, tmp_path / "run", "--dry_run")
    command = [*CONTAINER, "sh", "-c", disks, "sh", *command]
    ok(subprocess.run(command, cwd=ROOT, capture_output=True, text=True))


@pytest.mark.parametrize("version", ["1.13.1", "2.6.0+cu124"])
def test_a_pytorch_that_is_too_old_is_named_before_it_is_imported(version, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"debug = False\n__version__ = '{version}'\n")
    result = run_script("-X", "utf8", "train.py", PYTHONPATH=str(tmp_path))
    least = ".".join(map(str, startup.TORCH))
    assert f"torch>={least}" in (ROOT / "requirements.txt").read_text()
    words = f"has no PyTorch {least} or newer, but {version}:"
    fails_clearly(result, "train.py: ", words, "pip install -r requirements.txt")


@posix
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_tries_again_where_an_environment_got_no_pip(tmp_path):
    debians = tmp_path / "python3"  # without its package python3-venv
    debians.write_text(
        "#!/bin/sh\n"
        'test "$1" = -c && exit\n'
        f"mkdir -p .venv/bin && ln -sf {sys.executable} .venv/bin/python && exit 1\n"
    )
    debians.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", ".venv/bin/python", f"PYTHON={debians}"]
    for _ in range(2):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert f"{debians} -m venv .venv" in result.stdout
        assert result.returncode == 2


def test_a_tool_starts_as_a_file_from_any_folder(tmp_path):
    result = run_script(ROOT / "tools" / "report.py", "--help", cwd=tmp_path, PYTHONPATH="")
    assert result.stdout.startswith("usage: "), result.stderr


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "GOMP_SPINCOUNT", startup.SPIN),
        ({}, "THP_MEM_ALLOC_ENABLE", "1"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT", "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT", None),
        ({}, "TORCHINDUCTOR_VEC_ISA_OK", "1"),
        ({"TORCHINDUCTOR_CPP_MARCH": "x86-64-v3"}, "TORCHINDUCTOR_CPP_MARCH", "x86-64-v3"),
        ({}, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "PYTORCH_ALLOC_CONF", "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "PYTORCH_ALLOC_CONF", None),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, given, name, value):
    monkeypatch.delenv(name, raising=False)
    for variable, text in given.items():
        monkeypatch.setenv(variable, text)
    code = (
        "import os, pathlib, startup; startup.NVIDIA_DRIVER = pathlib.Path('startup.py')\n"
        f"startup.begin(); print(os.environ.get({name!r}))"
    )
    assert run_script("-c", code).stdout == f"{value}\n"


def test_a_run_in_python_has_the_environment_of_the_scripts(monkeypatch):
    """As a search has, whose compiled steps could be garbage on a CPU with AMX."""
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")
    code = "import os, train; print(os.environ.get('TORCHINDUCTOR_VEC_ISA_OK'))"
    assert run_script("-c", code).stdout == "1\n"


@pytest.mark.skipif(startup.NVIDIA_DRIVER.exists(), reason="this machine has NVIDIA's driver")
def test_the_allocator_is_pytorchs_where_another_driver_may_lack_its_segments(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    startup.tune_environment()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


TEXT = "Привет é 😀"
SHOWN = {"cp1252": r"\u041f\u0440\u0438\u0432\u0435\u0442 é \U0001f600", "utf-8": TEXT}


def echo(encoding, **streams):
    """A script that prints TEXT and the line that it reads, on a system with an encoding."""
    code = f"import startup; startup.begin(); print({TEXT!r}, input())"
    variables = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=variables, check=True, **streams)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_files_and_pipes_hold_utf_8_whatever_the_system_has(encoding):
    result = echo(encoding, input=TEXT.encode(), capture_output=True)
    assert result.stdout.decode() == f"{TEXT} {TEXT}{os.linesep}"


@posix
@pytest.mark.parametrize("encoding", SHOWN)
def test_a_terminal_shows_what_it_cannot_as_escapes(encoding):
    ours, its = os.openpty()
    echo(encoding, input=b"line", stdout=its)
    assert os.read(ours, 1000).decode(encoding).strip() == f"{SHOWN[encoding]} line"
    os.close(ours)
    os.close(its)


@posix
def test_a_line_is_in_a_log_at_once_and_a_reader_may_leave(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = f"import startup, os; startup.begin(); print({TEXT!r}); os._exit(0)"  # as SIGKILL
    assert run_script("-c", code).stdout == f"{TEXT}\n"
    code = "import startup, sys; startup.begin(); sys.exit(startup.run('me', lambda _: print(1)))"
    line = f"{sys.executable} -c {shlex.quote(code)} | true"
    assert subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True).stderr == b""


@posix
def test_streams_may_be_closed():
    code = "import startup, sys; startup.begin(); sys.exit(startup.run('me', lambda _: print(1)))"
    line = f"{sys.executable} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], cwd=ROOT).returncode == 0


ENDINGS = {
    "return": (0, ""),
    "return 3": (3, ""),
    "raise InputError('a mistake')": (2, "me.py: a mistake\n"),
    "raise PrepareError('no network')": (1, "me.py: no network\n"),
    "raise OSError('a failure')": (1, "me.py: a failure\n"),
    "raise BrokenPipeError": (0, ""),
    "raise KeyboardInterrupt": (130, ""),
    "raise KeyboardInterrupt(15)": (143, ""),
    "sys.exit(2)": (2, ""),
}


@pytest.mark.parametrize("statement", ENDINGS)
def test_each_ending_has_its_status_and_sentence(statement):
    code = (
        "import startup, sys\nfrom preparing import InputError, PrepareError\n"
        f"def main(argv): {statement}\n"
        "def explain(error): return error if isinstance(error, OSError) else None\n"
        "sys.exit(startup.run('me.py', main, explain))"
    )
    result = run_script("-c", code)
    assert (result.returncode, result.stderr) == ENDINGS[statement]


def test_an_error_that_nobody_explains_keeps_its_traceback():
    code = "import startup, sys; sys.exit(startup.run('me.py', lambda argv: 1 / 0))"
    result = run_script("-c", code)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_options_may_be_written_with_dashes():
    shown = {"--vocab-size": "--vocab_size", "--out-dir=a-b": "--out_dir=a-b", "a--b": "a--b"}
    shown |= {"—max_steps=3": "--max_steps=3", "–help": "--help", "— Well, ": "— Well, "}
    assert {word: startup.with_underscores(word) for word in shown} == shown
