"""--ray: the same bytes from a real cluster of two nodes, whatever dies on the way."""

import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import fails_clearly, run_script
from tests.preparing import torture
from tests.preparing.conftest import end, ok, prepare, sha
from tests.preparing.hub import Hub
from tests.preparing.hubs import begin, fetch

pytest.importorskip("ray", reason="needs the package ray")
PACE = 6_000_000  # bytes a second from the hub, so that there is time to be killed in
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
# So that a dead node is noticed within seconds.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 4,
}


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of two nodes with a core each, which `auto` does not find."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")  # the names of sockets in it may not become long
    monkeypatch.setenv("RAY_TMPDIR", folder)
    Path(folder, "ray").mkdir()  # where Ray writes down the address, and expects a folder
    head = NODE | {"include_dashboard": False, "temp_dir": folder, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_journal(process, out):
    """Wait until a run has noted how far it is, and a little longer. It must not be through."""
    torture.wait_for(out / ".partial/progress.json", process)
    time.sleep(0.5)
    assert process.poll() is None, end(process).stderr


def test_a_cluster_gives_the_same_bytes_whatever_dies(tmp_path, tokenizer, cluster):
    files = torture.make_input(tmp_path / "hub")
    kinds = {"given": {"tokenizer": tokenizer, "clean": True}, "char": {"tokenizer": "char"}}
    for name, flags in kinds.items():
        ok(prepare(files, out=tmp_path / name, **flags))
    on_ray = {"ray": cluster.address}
    with Hub(tmp_path / "hub", PACE) as hub:
        address = "hf://datasets/ORG/NAME/files"
        out = tmp_path / "killed"  # the main process is
        process = begin(hub, address, out=out, **kinds["given"], **on_ray)
        wait_for_journal(process, out)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        result = ok(fetch(hub, address, out=out, **kinds["given"], **on_ray))
        assert "continuing after" in result.stderr
        assert sha(out) == sha(tmp_path / "given")

        out = tmp_path / "died"  # a node does
        process = begin(hub, address, out=out, **kinds["char"], **on_ray)
        wait_for_journal(process, out)
        (node,) = cluster.worker_nodes
        node.all_processes["raylet"][0].process.kill()
        ok(end(process))
        assert sha(out) == sha(tmp_path / "char")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{bad\n')
    result = prepare(bad, tokenizer=tokenizer, out=tmp_path / "bad", **on_ray)
    fails_clearly(result, "bad.jsonl, line 2: not valid JSON", "--on_error skip")


def test_a_bad_address_is_named_at_once(tmp_path, tokenizer, text_file):
    flags = {"tokenizer": tokenizer, "out": tmp_path / "out"}
    words = ("no cluster answers there", "HOST:PORT", "auto", "ray start --head")
    for address in (
        "127.0.0.1:9",
        "nowhere.invalid:6379",
        "ray://127.0.0.1:10001",
        "somewhere",
        "127.0.0.1:123456",
    ):
        fails_clearly(prepare(text_file, ray=address, **flags), f"--ray {address}", *words)
    assert not (tmp_path / "out").exists()


def test_without_the_package_its_command_is_named(tmp_path, text_file):
    code = "import sys, startup; sys.modules['ray'] = None; import prepare_data as p\n"
    code += "sys.exit(startup.run('prepare_data.py', p.main, p.MISTAKES, p.explain))"
    result = run_script("-c", code, text_file, "--ray", "auto", "--out", tmp_path / "out")
    fails_clearly(result, "python -m pip install ray")
