"""A matrix on a real Ray cluster of two nodes on this machine, one of which is killed midway."""

import errno
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import frostlab as fl
from compared import compared_in
from frostlab.launcher import AT_ONCE
from frostlab.matrix.places import Places
from frostlab.matrix.ray_tasks import (
    RayTasks,
    Receiver,
    Sender,
    _Store,
    _train,
    all_pieces,
    check_address,
)
from frostlab.matrix.task import Outcome, Task
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from tiny import tiny

# Ray then stays on 127.0.0.1, and does not look for an address that other machines reach. It reads
# the variable when it is imported, and its processes inherit it.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def test_a_mirrored_folder_is_the_same_after_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostlab.matrix.ray_tasks._PIECE_BYTES", 3)
    here, there = tmp_path / "here", tmp_path / "there"
    sender, receiver = Sender(here), Receiver(there)

    def send() -> list[str]:
        pieces = list(sender.changes())
        for piece in pieces:
            receiver.apply(piece)
        assert contents(there) == {
            name: data for name, data in contents(here).items()
            if name != "run.lock" and ".tmp" not in name
        }  # fmt: skip
        return [piece.name for piece in pieces]

    (here / "checkpoints" / "step-1").mkdir(parents=True)
    (here / "checkpoints" / "step-1" / "model").write_bytes(b"weights" * 3)
    (here / "run.lock").touch()
    (here / ".recipe.yaml.0.tmp").write_text("half")
    (here / "events.jsonl").write_text("one\n")
    assert set(send()) == {"checkpoints/step-1/model", "events.jsonl"}
    assert send() == []
    with (here / "events.jsonl").open("a") as file:
        file.write("two\n")
    assert set(send()) == {"events.jsonl"}
    (here / "events.jsonl").write_text("one\n")  # a resumed run has cut off a line
    send()
    (here / "checkpoints" / "step-2").mkdir()
    (here / "checkpoints" / "step-2" / "model").write_bytes(b"new")
    (here / "checkpoints" / "step-1" / "model").unlink()
    (here / "checkpoints" / "step-1").rmdir()
    (here / "a-result").write_text("x")
    (here / "result.json").write_text("{}")
    names = send()
    assert names.index("result.json") > names.index("checkpoints/step-2/model")
    assert names[-1] == "checkpoints/step-1/model", "nothing is removed before the new is there"
    assert not (there / "checkpoints" / "step-1").exists()
    again = Receiver(tmp_path / "again")
    for piece in all_pieces(there):
        again.apply(piece)
    assert contents(tmp_path / "again") == contents(there)
    with pytest.raises(fl.BadInput, match="is not inside"):
        receiver.apply(type(all_pieces(there)[0])("../x", b""))


def test_what_could_not_be_sent_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's disk is full for a moment, while a run trains."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    ray = SimpleNamespace(get=lambda answer: answer, get_runtime_context=lambda: context)
    monkeypatch.setattr("frostlab.matrix.ray_tasks.require", lambda *_: ray)
    monkeypatch.setattr("frostlab.matrix.ray_tasks._SEND_SECONDS", 0.01)
    monkeypatch.setenv(AT_ONCE, "1")
    actor, failed, freed = _Store(), threading.Event(), threading.Event()

    def write(path: str, pieces: list[Any], log: str, text: bytes) -> bool:
        if pieces and not freed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return actor.write(path, pieces, log, text)

    def train(task: Task, *_: Any) -> Outcome:
        task.path.mkdir(exist_ok=True)
        (task.path / "recipe.yaml").write_text("a recipe")
        with (task.path / "events.jsonl").open("a") as file:
            file.write("one\n")
            file.flush()
            assert failed.wait(60)
            file.write("two\n")
        freed.set()
        return Outcome("finished", "words")

    monkeypatch.setattr("frostlab.matrix.ray_tasks.run_task", train)
    store = SimpleNamespace(begin=SimpleNamespace(remote=actor.begin),
                            write=SimpleNamespace(remote=write))  # fmt: skip
    task = Task("a", recipe_from(tiny()), tmp_path / "a", "a")
    assert _train(task, [], None, str(tmp_path / "log"), store, 1).kind == "finished"
    assert contents(tmp_path / "a") == {"recipe.yaml": b"a recipe", "events.jsonl": b"one\ntwo\n"}


class RemoteError(Exception):
    """An error of a Ray task, with the error that it raised as its cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a long text of Ray")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "blocked"),
        (RemoteError(OSError(errno.EROFS, "Read-only file system")), "blocked"),
        (OSError(errno.ENOENT, "No such file"), "failed"),
        (RemoteError(ValueError("a bug")), "failed"),
    ],
)
def test_a_full_disk_of_a_node_or_of_the_driver_is_waited_for(
    error: Exception, outcome: str, tmp_path: Path
) -> None:
    """The second and the fourth error come from the actor that a task called."""
    tasks = RayTasks.__new__(RayTasks)  # without a cluster
    tasks._ray = SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=RemoteError))
    task = Task("a", recipe_from(tiny()), tmp_path / "a", "a")
    found = tasks._problem(task, RemoteError(error))
    assert found.kind == outcome
    assert "a long text" not in found.text


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("nowhere", "should be HEAD:PORT"),
        ("a:b", "should be HEAD:PORT"),
        ("ray://a:1", r"\(Ray Client\) are not supported; log in to a machine of the cluster"),
    ],
)
def test_an_unreachable_address_is_one_line(address: str, message: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'frostlab[ray]'")
    with pytest.raises(fl.BadInput, match=message):
        Places(ray=address).check()
    with pytest.raises(fl.BadInput, match="--ray chooses the devices itself"):
        Places("cpu", ray=address).check()


def test_another_program_at_the_address_is_noticed_at_once() -> None:
    """Ray itself would wait for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'frostlab[ray]'")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(fl.BadInput, match=r"another program answers there; .*usually 6379"):
            check_address(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'frostlab[ray]'")
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1"},
    )
    yield made
    made.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_comparison_on_a_cluster_is_the_local_one(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is not part of the cluster is told so first."""
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    check_address(cluster.address)
    elsewhere = {"eth0": [types.SimpleNamespace(address="192.0.2.1")]}
    with monkeypatch.context() as patch:
        patch.setattr("psutil.net_if_addrs", lambda: elsewhere)
        with pytest.raises(fl.BadInput, match=r"not part of the cluster; run `ray start --address"):
            check_address(cluster.address)
    there = compared_in(tmp_path, "--ray", cluster.address)
    log = there / "queue" / "runs" / "logs" / "oelm-s1.log"
    first, *_, last = log.read_text().splitlines()
    assert first.startswith("step 0 of 16")
    assert last.startswith("finished: accuracy ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(600)  # it trains three runs of 6,000 steps twice
def test_a_node_that_dies_has_its_runs_go_on_elsewhere(cluster: Any, tmp_path: Path) -> None:
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    train = {"batch": 8, "steps": 6000, "threads": 1, "checkpoint": 200}
    recipe = tiny(train=train, evaluate={"every": 2000, "batch": 256})
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"recipes": ["small.yaml"], "seeds": 3}))
    command = [sys.executable, "-m", "frostlab", "matrix", "mine.yaml", "--ray", cluster.address]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    runs = tmp_path / "runs"
    state = runs / "matrices" / "mine" / "state.json"
    deadline = time.monotonic() + 200
    victim = ""
    while not victim:
        assert time.monotonic() < deadline
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.2)
        places = json.loads(state.read_text())["runs"] if state.exists() else {}
        for name, run in places.items():
            on_other = str(run["place"]).endswith(other.node_id[:6])
            if on_other and list((runs / name).glob("checkpoints/step-*/model.safetensors")):
                victim = name
    cluster.remove_node(other, allow_graceful=False)
    _, stderr = driver.communicate(timeout=280)
    assert driver.returncode == 0, stderr
    assert f"{victim}: " in stderr
    assert "the run goes on elsewhere" in stderr or "the run is tried once more" in stderr
    resumes = [
        json.loads(line) for line in (runs / victim / "events.jsonl").read_text().splitlines()
        if line.startswith('{"kind": "resume"')
    ]  # fmt: skip
    assert resumes[-1]["step"] > 0, "from the checkpoint that had arrived"
    for seed in range(3):
        alone = fl.run(str(tmp_path / "small.yaml"), seed=seed, out=tmp_path / f"alone-{seed}")
        there = RunRecord(runs / f"small-none-s{seed}")
        assert there.result.weights_digest == alone.result.weights_digest
    verified = subprocess.run([sys.executable, "-m", "frostlab", "verify", "runs"], cwd=tmp_path)
    assert verified.returncode == 0
