"""BatchNorm among several processes: shared on GPUs, refused elsewhere, left alone if frozen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.models.conformer import Conformer
from frostlab.training.distributed import sync_batch_norms
from zoo import CONFORMER, recordings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def middles(model: Conformer) -> list[type]:
    return [type(block.convolution.middle) for block in model.blocks]


def test_one_process_changes_nothing() -> None:
    model = Conformer(CONFORMER)
    sync_batch_norms(model, 1, CPU)
    assert middles(model) == [nn.BatchNorm1d] * 2


def test_several_on_a_cpu_are_refused_in_one_line() -> None:
    with pytest.raises(fl.BadInput, match="2 processes on cpu, only on GPUs; use layer or group"):
        sync_batch_norms(Conformer(CONFORMER), 2, CPU)


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_other_norms_need_nothing(norm: str) -> None:
    model = Conformer(replace(CONFORMER, norm=norm))
    before = middles(model)
    sync_batch_norms(model, 2, CPU)
    assert middles(model) == before


def test_on_gpus_norms_that_learn_are_shared_with_the_weights_they_had() -> None:
    model = Conformer(CONFORMER)
    fl.freeze(model, "layers[0]")
    names = set(model.state_dict())
    held = {id(p) for p in model.parameters()}
    sync_batch_norms(model, 2, CUDA)
    sync_batch_norms(model, 2, CUDA)  # twice is once
    assert middles(model) == [nn.BatchNorm1d, nn.SyncBatchNorm]
    assert set(model.state_dict()) == names
    assert {id(p) for p in model.parameters()} == held
    sync_batch_norms(model, 2, CUDA)
    assert fl.anatomy(model).select("layers[1].norm")


def test_a_shared_norm_that_is_frozen_keeps_its_statistics() -> None:
    model = Conformer(CONFORMER)
    sync_batch_norms(model, 2, CUDA)
    fl.freeze(model, "norm")
    proof = fl.audit(model)
    model.train()
    model(**recordings())
    proof.verify(model)
    assert "blocks.1.convolution.middle.running_var" in proof.digests
    fl.thaw(model)
    model(**recordings())
    with pytest.raises(fl.FrozenWeightsMoved, match="middle.running_mean"):
        proof.verify(model)


def test_frozen_norms_may_run_anywhere() -> None:
    model = Conformer(CONFORMER)
    fl.freeze(model, "norm")
    sync_batch_norms(model, 2, CPU)
    assert middles(model) == [nn.BatchNorm1d] * 2
