"""--ray: the same bytes from a real cluster of two nodes, whatever dies on the way."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import fails_clearly, ok, run_code
from tests.preparing.conftest import end, prepare, sha, start, wait_for_progress
from tests.preparing.hub import Hub
from tests.preparing.torture import make_input

pytest.importorskip("ray", reason="needs the package ray")
PACE = 3_000_000  # bytes a second of each file from the hub, so that there is time to be killed in
# Without the processes that collect logs, and that start and stop machines.
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
NODE |= {"include_log_monitor": False, "no_monitor": True}
# So that a dead node is noticed within seconds.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes with a core each, which `auto` does not find."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")  # the names of sockets in it may not become long
    Path(folder, "ray").mkdir()  # where Ray writes down the address, and expects a folder
    head = NODE | {"include_dashboard": False, "temp_dir": folder, "_system_config": HEALTH}
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def test_a_mistake_is_named_from_a_cluster_too(tmp_path, flags, cluster):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{bad\n')
    result = prepare(bad, ray=cluster.address, **flags)
    fails_clearly(result, "bad.jsonl, line 2: not valid JSON", "--on_error skip")


def test_a_cluster_gives_the_same_bytes_though_a_node_dies(tmp_path, cluster):
    files = make_input(tmp_path / "hub")
    flags = {"tokenizer": "char", "clean": True}
    ok(prepare(files, out=tmp_path / "whole", **flags))
    address = "hf://datasets/ORG/NAME/files"
    out = tmp_path / "died"
    with Hub(tmp_path / "hub") as hub:
        hub.bytes_a_second = PACE
        process = start(address, hub=hub, ray=cluster.address, out=out, **flags)
        wait_for_progress(process, out)
        time.sleep(0.5)
        assert process.poll() is None, end(process).stderr
        (node,) = cluster.worker_nodes
        node.all_processes["raylet"][0].process.kill()
        ok(end(process))
    assert sha(out) == sha(tmp_path / "whole")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:10001", "somewhere"])
def test_a_bad_address_is_named_at_once(tmp_path, flags, text_file, address):
    result = prepare(text_file, ray=address, **flags)
    fails_clearly(result, f"--ray {address}: no cluster answers there", "ray start --head")
    assert not (tmp_path / "out").exists()


def test_without_the_package_its_command_is_named(tmp_path, text_file):
    code = "import sys, startup; sys.modules['ray'] = None; import prepare_data as p\n"
    code += "sys.exit(startup.run('prepare_data.py', p.main, p.explain))"
    result = run_code(code, text_file, "--ray", "auto", "--out", tmp_path / "out")
    fails_clearly(result, "python -m pip install ray")
