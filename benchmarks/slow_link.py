"""Two processes on a link held to 200 Mbit/s: what sending gradients during the backward is worth.

    python -m benchmarks.slow_link [--megabytes 10|50] [--mbit 200] [options of benchmarks.ranks]

Each process runs benchmarks.ranks in a network namespace of its own; a pair of virtual cards joins
them, held to that rate in both directions by `tc tbf`. Linux only, as root, with iproute2. The
namespaces are removed in the end. The machine should do nothing else.
"""

import contextlib
import os
import shutil
import subprocess
import sys

from benchmarks import ROOT, argument_parser

NAMESPACES = ("slow_link_0", "slow_link_1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
CARD = "slow"
# Megabytes of gradients: a model that has as many, and a batch whose step takes about as long as
# its gradients on the link.
SIZES = {
    10: ("--n_layer=4", "--n_embd=192", "--batch=8", "--rounds=10", "--steps=2"),
    50: ("--n_layer=6", "--n_embd=384", "--batch=8", "--rounds=5", "--steps=1"),
}


def missing():
    """What this machine lacks, in a sentence; None where it lacks nothing."""
    tools = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if tools:
        return f"this benchmark needs {' and '.join(tools)} (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "this benchmark makes network namespaces, which takes root"
    return None


def run(*command):
    """Run a command, silently. Raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def slow_link(mbit):
    """The namespaces and the link between them, for as long as they are needed."""
    try:
        for namespace in NAMESPACES:
            run("ip", "netns", "add", namespace)
        one, other = NAMESPACES
        ends = ("ip", "link", "add", CARD, "netns", one, "type", "veth", "peer", "name", CARD)
        run(*ends, "netns", other)
        for namespace, address in zip(NAMESPACES, ADDRESSES, strict=True):
            inside = ("ip", "-n", namespace)
            run(*inside, "addr", "add", f"{address}/24", "dev", CARD)
            run(*inside, "link", "set", CARD, "up")
            run(*inside, "link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
            run("tc", "-n", namespace, "qdisc", "add", "dev", CARD, "root", *limit)
        yield
    finally:
        for namespace in NAMESPACES:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def start(rank, arguments):
    """One of the two processes."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29577",
        "GLOO_SOCKET_IFNAME": CARD,
        "OMP_NUM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", NAMESPACES[rank], sys.executable, "-m", "benchmarks.ranks"]
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=os.environ | environment)


def main(argv):
    """The command line's work."""
    parser = argument_parser("slow_link", __doc__)
    parser.add_argument("--megabytes", type=int, default=10, choices=SIZES)
    parser.add_argument("--mbit", type=int, default=200)
    args, others = parser.parse_known_args(argv)
    problem = missing()
    if problem:
        sys.exit(f"benchmarks.slow_link: {problem}")
    name = f"--name=slow_link_{args.megabytes}MB"
    arguments = [f"--link={args.mbit} Mbit/s", name, *SIZES[args.megabytes], *others]
    with slow_link(args.mbit):
        processes = [start(rank, arguments) for rank in range(2)]
        try:
            statuses = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    main(sys.argv[1:])
