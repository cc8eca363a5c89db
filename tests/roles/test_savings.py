"""The ceiling on what freezing saves, against published figures and torch's own counter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.timing.flops import savings


def on_meta(make: object) -> nn.Module:
    with torch.device("meta"):
        return make()  # type: ignore[operator]


BERT = lambda: BertForSequenceClassification(BertConfig(num_labels=3))  # noqa: E731


@pytest.mark.parametrize(
    ("make", "length", "selection", "share", "speed_up"),
    [
        (BERT, 128, ("query", "key"), 0.0541, 1.057),
        (BERT, 512, ("query", "key"), 0.0500, 1.053),
        (lambda: GPT2LMHeadModel(GPT2Config()), 1024, ("query", "key"), 0.0331, 1.034),
        (lambda: GPT(GPTConfig()), 512, ("query", "key"), 0.0220, 1.023),
        (lambda: Decoder(DecoderConfig(layers=3)), 32, ("query", "key"), 0.0018, 1.002),
        (BERT, 128, ("query", "key", "up", "down"), 0.270, 1.37),
    ],
)
def test_known_ceilings(
    make: object, length: int, selection: tuple[str, ...], share: float, speed_up: float
) -> None:
    found = savings(fl.anatomy(on_meta(make)).with_frozen(*selection), length)
    assert found.flop_share == pytest.approx(share, abs=1e-4 if share < 0.2 else 1e-3)
    assert found.speed_up == pytest.approx(speed_up, abs=2e-3)


def test_memory_of_bert_base() -> None:
    found = savings(fl.anatomy(on_meta(BERT)).with_frozen("query", "key"), 128)
    mib = 2**20
    assert round((found.bytes_all - found.bytes) / mib) == 162
    assert round(found.bytes_all / mib) == 1253  # gradient and two moments in float32


@pytest.mark.parametrize(
    "selection",
    [
        ("query", "key"),
        ("embedding", "position", "layers[0:2]", "norm"),
        ("all", "!head"),
        ("layers[1]",),
        ("embedding", "position", "norm"),
    ],
)
def test_the_model_of_cost_agrees_with_the_flop_counter(selection: tuple[str, ...]) -> None:
    length, batch = 16, 4
    config = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=64, vocab_size=99)  # fmt: skip
    model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    ids = torch.randint(3, 99, (batch, length))

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=torch.zeros(batch, dtype=torch.long)).loss.backward()
        return counter.get_total_flops()

    everything = counted()
    anatomy = fl.freeze(model, *selection)
    expected = 1 - counted() / everything
    assert savings(anatomy, length).flop_share == pytest.approx(expected, abs=2e-3)


def test_nothing_frozen_saves_nothing() -> None:
    found = savings(fl.anatomy(on_meta(BERT)), 128)
    assert (found.flop_share, found.speed_up) == (0.0, 1.0)
