"""Generation: cached equals uncached, a batch equals single prompts, and Hugging Face's choices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    TopPLogitsWarper,
)

import frostlab as fl
from cases import slow_unless
from frostlab.models import sampling as generation
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.models.sampling import (
    HuggingFaceReader,
    OwnReader,
    Sampling,
    choose,
    continue_prompts,
    position_limit,
)
from zoo import GPT_SIZES, SIZES

PROMPTS = [[5, 6, 7, 8, 9], [11], [5, 6, 7], [20, 21, 22]]
GREEDY = Sampling(max_tokens=12, temperature=0)


def lively(model: Any) -> Any:
    """The model in float64 and in evaluation mode, with weights whose choices vary."""
    with torch.no_grad():
        for parameter in model.double().eval().parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gpt(**changes: Any) -> GPT:
    sizes = {"vocabulary": 99, "positions": 64, "width": 32, "layers": 2, "heads": 4, "hidden": 64}
    return lively(GPT(GPTConfig(**(sizes | changes))))


def decoder(**changes: Any) -> Decoder:
    return lively(Decoder(DecoderConfig(99, 32, 2, 4, 64, **changes)))


def split_gpt() -> GPT:
    model = gpt()
    fl.freeze(model, "query", "key")
    return model


def roberta() -> RobertaForCausalLM:
    """A RoBERTa that never writes padding, which it would not count as a position."""
    model = lively(RobertaForCausalLM(RobertaConfig(**SIZES, is_decoder=True)))
    model.lm_head.decoder.bias.data[1] = -1e9
    return model


OWN = {
    "gpt": gpt,
    "gpt with a split QKV": split_gpt,
    "decoder, norm after": decoder,
    "decoder, norm before": lambda: decoder(norm="before", final_norm=True),
    "gpt, qk_norm": lambda: gpt(qk_norm=True),
    "decoder, qk_norm": lambda: decoder(qk_norm=True),
}
HUGGING_FACE = {
    "gpt2": lambda: lively(GPT2LMHeadModel(GPT2Config(**GPT_SIZES))),
    "llama": lambda: lively(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))),
    "bert": lambda: lively(BertLMHeadModel(BertConfig(**SIZES, is_decoder=True))),
    "roberta": lambda: roberta(),
    "opt": lambda: lively(
        OPTForCausalLM(
            OPTConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, ffn_dim=64,
                      num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32)
        )
    ),
}  # fmt: skip
ALL = OWN | HUGGING_FACE


def logits_of(model: Any, ids: Tensor) -> Tensor:
    output = model(ids)
    return output if isinstance(output, Tensor) else output.logits


@torch.no_grad()
@pytest.mark.parametrize("name", OWN)
def test_logits_with_the_cache_equal_those_without(name: str) -> None:
    model = OWN[name]()
    ids = torch.randint(0, 99, (3, 12))
    padding = torch.tensor([0, 2, 5])
    padded = torch.stack([torch.cat([torch.zeros(n).long(), row[: 12 - n]])
                          for row, n in zip(ids, padding.tolist(), strict=True)])  # fmt: skip
    reader = OwnReader(model, padding, 12)
    read = [reader.read(padded[:, start:stop]) for start, stop in ((0, 6), (6, 7), (7, 10))]
    for logits, stop in zip(read, (6, 7, 10), strict=True):
        for row, n in enumerate(padding.tolist()):
            expected = model(ids[row : row + 1, : stop - n])[0, -1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-10, atol=1e-10)
    reader.keep(torch.tensor([2, 2, 0]))
    kept = reader.read(padded[[2, 2, 0], 10:12])
    torch.testing.assert_close(kept[0], kept[1])
    torch.testing.assert_close(kept[1], model(ids[2:, :7])[0, -1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kept[2], model(ids[:1])[0, -1], rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_logits_with_the_cache_equal_those_without(name: str) -> None:
    model = HUGGING_FACE[name]()
    ids = torch.randint(5, 99, (3, 9))
    reader = HuggingFaceReader(model)
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        logits = reader.read(ids[:, start:stop])
        torch.testing.assert_close(logits, logits_of(model, ids[:, :stop])[:, -1])
    assert reader.cache is not None
    reader.keep(torch.tensor([2, 0, 2]))
    torch.testing.assert_close(
        reader.read(ids[[2, 0, 2], 7:]), logits_of(model, ids[[2, 0, 2]])[:, -1]
    )


@torch.no_grad()
def test_a_model_without_a_cache_reads_everything_again() -> None:
    model = HUGGING_FACE["gpt2"]()
    cached = continue_prompts(model, PROMPTS, Sampling(max_tokens=6, samples=2))
    forward = model.forward

    def forget(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.past_key_values = None
        return output

    model.forward = forget
    assert continue_prompts(model, PROMPTS, Sampling(max_tokens=6, samples=2)) == cached


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_greedy_is_the_argmax_of_the_whole_text(name: str) -> None:
    model = ALL[name]()
    for prompt, (made,) in zip(PROMPTS, continue_prompts(model, PROMPTS, GREEDY), strict=True):
        assert (len(made.tokens), made.ended) == (12, "length")
        text = torch.tensor([[*prompt, *made.tokens]])
        expected = logits_of(model, text).argmax(-1)[0, len(prompt) - 1 : -1]
        assert expected.tolist() == list(made.tokens)


@pytest.mark.parametrize(
    "name", slow_unless(["gpt with a split QKV", "decoder, norm after", "llama", "roberta"], ALL)
)
def test_a_sample_does_not_depend_on_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ALL[name]()
    sampling = Sampling(max_tokens=12, temperature=1.5, top_p=0.9, seed=7, samples=5)
    ends = [3, 4, 50, 51]
    together = continue_prompts(model, PROMPTS, sampling, ends=ends)
    for prompt, made in zip(PROMPTS, together, strict=True):
        assert continue_prompts(model, [prompt], sampling, ends=ends) == [made]
        assert len({sample.tokens for sample in made}) > 1, "samples differ"
    fewer = continue_prompts(model, PROMPTS, replace(sampling, samples=2), ends=ends)
    assert fewer == [made[:2] for made in together]
    monkeypatch.setattr(generation, "_ROWS", 3)
    assert continue_prompts(model, PROMPTS, sampling, ends=ends) == together
    assert continue_prompts(model, PROMPTS, replace(sampling, seed=8), ends=ends) != together


def test_more_tokens_continue_the_same_sample() -> None:
    model = gpt()
    short = continue_prompts(model, PROMPTS, Sampling(max_tokens=5, samples=2))
    long = continue_prompts(model, PROMPTS, Sampling(max_tokens=20, samples=2))
    for before, after in zip(short, long, strict=True):
        assert [sample.tokens[:5] for sample in after] == [sample.tokens for sample in before]


@pytest.mark.parametrize("make", [gpt, lambda: decoder(norm="before", final_norm=True)])
def test_greedy_equals_hugging_face_on_the_exported_model(make: Any, tmp_path: Any) -> None:
    model = make()
    end = continue_prompts(model, PROMPTS[:1], GREEDY)[0][0].tokens[4]
    fl.export(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    made = continue_prompts(model, PROMPTS, GREEDY, ends=[end])
    assert any(sample.ended == "end" for (sample,) in made)
    for prompt, (sample,) in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        assert out[0, len(prompt) :].tolist() == list(sample.tokens)


def test_a_sample_ends_at_an_end_token_or_at_the_last_position() -> None:
    model = gpt(positions=9)
    (free,) = continue_prompts(gpt(), PROMPTS[:1], GREEDY)[0]
    assert len(free.tokens) == 12
    assert position_limit(model) == 9
    assert position_limit(decoder()) is None
    made = [sample for (sample,) in continue_prompts(model, PROMPTS, GREEDY)]
    assert [len(sample.tokens) for sample in made] == [4, 8, 6, 6]
    assert {sample.ended for sample in made} == {"positions"}
    end = made[0].tokens[1]
    (stopped,) = continue_prompts(model, PROMPTS[:1], GREEDY, ends=[end])[0]
    count = made[0].tokens.index(end) + 1
    assert (stopped.tokens, stopped.ended) == (made[0].tokens[:count], "end")
    assert position_limit(HUGGING_FACE["gpt2"]()) == 64
    assert position_limit(HUGGING_FACE["roberta"]()) == 62
    with pytest.raises(fl.BadInput, match="9 tokens; the model has 9 positions, so .* at most 8"):
        continue_prompts(model, [[1] * 9], GREEDY)


def naive_choice(logits: Any, temperature: float, top_p: float, draw: float) -> int:
    """Top-p sampling of one row, written out."""
    weights = np.exp(logits / temperature - np.max(logits / temperature))
    probabilities = weights / weights.sum()
    ranked = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    kept, total = [], 0.0
    for token in ranked:
        kept.append(token)
        total += probabilities[token]
        if total >= top_p:
            break
    passed = 0.0
    for token in kept:
        passed += probabilities[token] / total
        if draw < passed:
            return token
    return kept[-1]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_choices_equal_a_naive_implementation(top_p: float) -> None:
    logits, draws = 3 * torch.randn(200, 40).double(), torch.rand(200).double()
    sampling = Sampling(temperature=0.7, top_p=top_p)
    chosen = choose(logits, sampling, draws).tolist()
    expected = [
        naive_choice(row, 0.7, top_p, draw)
        for row, draw in zip(logits.numpy(), draws.tolist(), strict=True)
    ]
    assert chosen == expected


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_sorting_only_candidates_changes_no_choice(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with ties, whether the candidates hold enough probability or not."""
    logits = (scale * torch.randn(300, 200).double()).round(decimals=1)
    draws, sampling = torch.rand(300).double(), Sampling(temperature=0.9, top_p=0.9)
    whole = choose(logits, sampling, draws)
    monkeypatch.setattr(generation, "_CANDIDATES", 40)
    rows = [choose(logits[[n]], sampling, draws[[n]]) for n in range(300)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(choose(logits, sampling, draws), whole)
    sizes = {generation._rank(row[None].softmax(-1), 0.9)[0].shape[1] for row in logits}
    assert sizes == ({200} if scale == 0.5 else {40, 200} if scale == 3.0 else {40})


def test_choices_follow_the_probabilities_that_hugging_face_keeps() -> None:
    logits = 2 * torch.randn(1, 12).double()
    kept = TopPLogitsWarper(0.8)(torch.zeros(1, 1).long(), logits / 0.9).softmax(-1)[0]
    draws = (torch.arange(20_000).double() + 0.5) / 20_000
    chosen = choose(logits.expand(20_000, -1), Sampling(temperature=0.9, top_p=0.8), draws)
    shares = torch.bincount(chosen, minlength=12) / 20_000
    torch.testing.assert_close(shares.double(), kept, atol=1e-4, rtol=0)


def test_extreme_draws_and_temperatures_choose_a_kept_token() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.9, -5.0]])
    last = torch.tensor([1 - 2**-53]).double()
    assert choose(logits, Sampling(top_p=0.01), last).tolist() == [1]
    assert choose(logits, Sampling(temperature=1e-300), last).tolist() == [1]
    assert choose(logits, Sampling(temperature=1e300, top_p=1.0), last).tolist() == [3]
    assert choose(logits, Sampling(temperature=0), last).tolist() == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0 should be 0 or more"),
        ({"temperature": float("nan")}, "temperature nan should be 0 or more"),
        ({"top_p": 0.0}, "top-p 0.0 should be above 0 and at most 1"),
        ({"top_p": 1.1}, "top-p 1.1 should be above 0 and at most 1"),
        ({"max_tokens": 0}, "tokens 0 should be from 1 to 1,048,576"),
        ({"max_tokens": 2**20 + 1}, "tokens 1048577 should be from 1 to 1,048,576"),
        ({"seed": -1}, "seed -1 should be 0 or more"),
        ({"samples": 0}, "samples 0 should be 1 or more"),
        ({"samples": 3, "temperature": 0.0}, "at temperature 0 all 3 samples are equal"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(fl.BadInput, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("changes", [{"causal": False}, {"classes": 3}])
def test_a_model_that_is_not_causal_is_refused(changes: Any) -> None:
    with pytest.raises(fl.BadInput, match="not a causal language model"):
        continue_prompts(gpt(**changes), PROMPTS, GREEDY)


def test_a_diverged_model_is_refused() -> None:
    model = gpt()
    model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(fl.BadInput, match="logits are not numbers"):
        continue_prompts(model, PROMPTS, GREEDY)
