"""Kill a real training run again and again: it must end as one that was left alone.

    python -m tests.torture --kills 100
    python -m tests.torture --kills 30 --mirror

With the same weights and the same log, that is. Each kill is SIGKILL at a random moment, so it
strikes the start, steps, evaluations and saves alike; saves come often. With --mirror it
strikes uploads to an S3 server on loopback, and every second kill takes the machine's disk with it.
"""

import argparse
import contextlib
import random
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from time import monotonic, sleep

from command_line import count
from formats.mirror import Mirror
from tests.conftest import prepare
from tests.training.conftest import assert_same_end, start

SETTINGS = shlex.split(
    "--micro_batch_size=4 --dropout=0.1 --log_interval=3 --eval_interval=25 --save_interval=4"
    " --save_minutes=0.005 '--sample_prompts=The '"
)
MIRROR = "s3://bucket/runs"
UPLOAD_S = 0.08  # that each file takes, so that there is time to be killed in


def run_once(data, folder, steps, kill_when=None, *more):
    """Run train.py; SIGKILL once `kill_when(process)` returns. Whether it ended by itself."""
    process = start(data, folder, f"--max_steps={steps}", *SETTINGS, *more)
    if kill_when:
        kill_when(process)
        process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -9), errors
    return process.returncode == 0


def torture(data, folder, kills, steps, store=None):
    """Train once undisturbed, then again and again with kills.

    Until `kills` have struck; each run goes on to its end, and is compared there. store: a Store,
    in which the killed runs have their mirror. Returns the number of these runs, and of kills that
    left half a save, on the disk or in the mirror.
    """
    begun = monotonic()
    assert run_once(data, folder / "whole", steps)
    usual = monotonic() - begun
    dice = random.Random(0)
    struck = halves = runs = 0

    def at_random(process):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0, 0.9 * usual))

    def in_an_upload(process):
        for _ in range(dice.randrange(1, 12)):
            store.arrived.clear()
            while process.poll() is None and not store.arrived.wait(0.05):
                pass
        sleep(dice.uniform(0, 2 * UPLOAD_S))

    kill_when, more = at_random, []
    if store:
        store.slow_s = UPLOAD_S
        kill_when, more = in_an_upload, [f"--mirror={MIRROR}"]
    while struck < kills:
        killed = folder / f"killed_{runs}"
        while not run_once(data, killed, steps, kill_when if struck < kills else None, *more):
            struck += 1
            if store:
                halves += check_mirror(killed.name, folder / "look")
                if struck % 2 == 0:
                    shutil.rmtree(killed)
            else:
                halves += any(killed.glob(".step_*.partial"))
            print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
        assert_same_end(folder / "whole", killed)
        shutil.rmtree(killed)
        runs += 1
    return runs, halves


def check_mirror(name, folder):
    """Raises CheckpointError unless a mirror's newest step is whole; whether it has a half one."""
    mirror = Mirror(f"{MIRROR}/{name}")
    whole = mirror.whole()
    if whole:
        mirror.fetch(whole[-1], folder)
        shutil.rmtree(folder)
    return len(mirror.steps()) > len(whole)


def main():
    """The command line's work."""
    page = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=page)
    parser.add_argument("--kills", type=count, default=100)
    parser.add_argument("--steps", type=count, default=200, help="of a run; default %(default)s")
    parser.add_argument("--mirror", action="store_true", help="kill in uploads")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder, store = Path(stack.enter_context(tempfile.TemporaryDirectory())), None
        if args.mirror:
            from tests.training.store import Store

            store = stack.enter_context(Store())
        data = prepare(__file__, folder / "data", "--tokenizer", "char")
        runs, halves = torture(data, folder, args.kills, args.steps, store)
    print(
        f"{args.kills} kills over {runs} runs, {halves} of them left half a save: every run ended"
        " in the log and the weights of an undisturbed one, bit for bit"
    )


if __name__ == "__main__":
    main()
