"""One trainer per run, signals that end it with a save, and random kills."""

import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import config
from formats import run_folder
from formats.data_folder import DataError
from tests import warm_start
from tests.conftest import (
    ROOT,
    fails_clearly,
    losses,
    ok,
    run_code,
    train_command,
    train_small,
    trained,
    wait_until,
)
from tests.torture import torture
from tests.training.conftest import WITH_ITS_COMPILER, start
from train import train

ENDLESS = ["--max_steps=100000", "--eval_interval=0"]


def test_a_second_trainer_refuses_and_names_the_first(char_data, tmp_path):
    first = start(char_data, tmp_path, *ENDLESS)
    wait_until(first, lambda: losses(tmp_path)[0])
    second = train_small(char_data, tmp_path, "--max_steps=10", "--eval_interval=0")
    first.kill()
    first.communicate()
    fails_clearly(second, f"process {first.pid}", "checkpoint_dir", status=1)
    trained(char_data, tmp_path, "--max_steps=10")  # the lock of the dead one does not count


def test_killed_at_random_moments_it_ends_in_the_same_weights(char_data, tmp_path):
    torture(char_data, tmp_path, kills=3, steps=60)


def test_a_signal_while_compiling_does_not_wait_for_the_compilers(char_data, tmp_path):
    compiler, at_work, end = tmp_path / "c++", tmp_path / "at_work", tmp_path / "end"
    compiler.write_text(
        f"""#!/bin/sh
        case "$*" in
            *.main.cpp*) touch {at_work}; until [ -e {end} ]; do sleep 0.1; done; exit 1;;
            *c++-header*) exit 0;;
            *.cpp*) exit 1;; # tests of what the machine can do
        esac
        exec c++ "$@"
        """
    )
    compiler.chmod(0o755)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = ["-c", WITH_ITS_COMPILER, *train_command(char_data, tmp_path / "run")[1:]]
    process = warm_start.Process([*command, "--compile=True"], ROOT, variables=variables)
    wait_until(process, at_work.exists)
    time.sleep(1)  # a signal just before Python begins to wait for a lock is handled after the wait
    process.terminate()
    assert process.wait(timeout=300) == 143
    end.touch()  # all compilers end, those too that begin only now
    assert not run_folder.steps(tmp_path / "run")


def test_a_second_ctrl_c_leaves_at_once():
    code = """
        import os, signal
        from training.distributed import StopFlag
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop = StopFlag()
        os.kill(os.getpid(), signal.SIGINT)
        print(stop.signum, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        print("still running", flush=True)
    """
    result = run_code(textwrap.dedent(code))
    assert result.returncode == 130
    assert result.stdout == "2\n"
    assert "exited immediately; the last checkpoint is intact" in result.stderr


def test_after_a_run_in_python_ctrl_c_is_what_it_was(char_data, tmp_path):
    """As in a notebook, which a second one would have ended without its variables."""
    code = """
        import signal, sys, config
        from train import train
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        status = train(config.load(sys.argv[1:]))
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        sys.exit(status)
    """
    command = train_command(char_data, tmp_path, "--max_steps=2", "--eval_interval=0")
    ok(run_code(textwrap.dedent(code), *command[1:]))


def test_an_error_in_a_thread_is_that_of_the_run(tmp_path):
    """As in a server, whose thread may set no handlers."""
    settings = config.load([f"--data_dir={tmp_path}", f"--checkpoint_dir={tmp_path}/run"])
    with ThreadPoolExecutor() as threads, pytest.raises(DataError):
        threads.submit(train, settings).result()


def test_nohup_is_respected(char_data, tmp_path):
    as_nohup = {signal.SIGHUP: signal.SIG_IGN}
    process = start(char_data, tmp_path, "--max_steps=100", handlers=as_nohup)
    wait_until(process, lambda: losses(tmp_path)[0])
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "finished: 100 steps" in out
