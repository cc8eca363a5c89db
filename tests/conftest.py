"""Settings every test shares."""

import gc
import os
import socket
import tempfile
from functools import cache
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 can kill Python otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has one core
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("FROSTLAB_CACHE", tempfile.mkdtemp(prefix="frostlab-tests-"))

import pytest

os.fsync = lambda _: None  # no test outlives the machine, and disks are slow
_LOOKS = f"looks-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl"


def pytest_configure(config: pytest.Config) -> None:
    """Set up the libraries, unless this process only hands the tests to workers."""
    if config.getoption("numprocesses", None):
        return
    from outside import declare_operators

    declare_operators()  # before transformers imports torchvision, where there is one
    if "PYTEST_XDIST_WORKER" in os.environ:
        from forked import BESIDE_GPU, fork_server

        if not BESIDE_GPU:
            fork_server()
    import torch
    import transformers

    from frostlab import charts
    from frostlab.comparison.judging import looks
    from frostlab.pages import write

    looks.REGISTER = _LOOKS
    charts._PIXELS = 0.5  # small figures
    write.figure_files = cache(write.figure_files)  # each once
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_warn_always(True)  # not once a process: which test comes first must not matter


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the shuffled tests of a folder together: few of them are then split between workers.

    What a folder's tests share is made once a worker.
    """
    folders = {folder: n for n, folder in enumerate(dict.fromkeys(i.path.parent for i in items))}
    items.sort(key=lambda item: folders[item.path.parent])


def pytest_collection_finish() -> None:
    """Leave what is there now out of garbage collection, which takes a quarter second of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """As torch.manual_seed does, which writes down three stack traces each time."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _no_earlier_looks() -> None:
    """Forget the comparisons of other tests, which would count as earlier looks."""
    (Path(os.environ["FROSTLAB_CACHE"]) / _LOOKS).unlink(missing_ok=True)


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
