"""Generation of text with a causal language model, several prompts and samples at once.

frostlab's own models, and Hugging Face models with a key/value cache, keep the keys and values of
the tokens that they have read, so they read each token once.
"""

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from frostlab.data.tokenizers import Encoder
from frostlab.devices import exact_dtype
from frostlab.errors import BadInput
from frostlab.models.attention import KeyValueCache
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT

Ended = Literal["end", "length", "positions"]
_ROWS = 64  # the most samples that are generated at once
# sort only this many of the most probable tokens if their probabilities sum to more than top_p
_CANDIDATES = 1024
# by so much their sum must exceed top_p: more than its rounding error in float64 (on MPS, where the
# sum is float32, the error can be larger)
_MARGIN = 1e-9
_LONGEST = 2**20  # the most tokens of a sample


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and how many tokens and samples are generated."""

    max_tokens: int = 100
    temperature: float = 0.8  # 0: always the most probable token
    top_p: float = 0.95  # keep the most probable tokens whose probabilities sum to this
    seed: int = 0
    samples: int = 1  # continuations of each prompt

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= _LONGEST:
            raise BadInput(f"generate: tokens {self.max_tokens} should be from 1 to {_LONGEST:,}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadInput(f"generate: temperature {self.temperature} should be 0 or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"generate: top-p {self.top_p} should be above 0 and at most 1")
        if self.seed < 0:
            raise BadInput(f"generate: seed {self.seed} should be 0 or more")
        if self.samples < 1:
            raise BadInput(f"generate: samples {self.samples} should be 1 or more")
        if self.samples > 1 and self.temperature == 0:
            raise BadInput(
                f"generate: at temperature 0 all {self.samples} samples are equal; ask for one"
            )

    def draws(self, sample: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return one random number per token, from 0 to below 1, for a continuation of a prompt.

        `sample` is the index of the continuation. The numbers depend only on the seed and on this
        index, not on the prompt, the model, the device, or the other samples.
        """
        return np.random.default_rng([self.seed, sample]).random(self.max_tokens)


@dataclass(frozen=True)
class Sample:
    """A text that a language model generated."""

    prompt: str
    text: str  # the continuation of the prompt
    tokens: tuple[int, ...]  # of the continuation, with the end token, if it was generated
    ended: Ended  # at an end token, at `max_tokens`, or at the model's last position


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt."""

    tokens: tuple[int, ...]  # with the end token, if it was generated
    ended: Ended  # at an end token, at `max_tokens`, or at the model's last position


class Reader(Protocol):
    """A model that reads rows of tokens step by step and remembers them."""

    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens (B, T) of each row; return logits (B, vocabulary) after the last."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; a row that is named twice is copied."""


class OwnReader:
    """A reader for frostlab's GPT and Decoder; shorter rows begin with padding."""

    def __init__(self, model: GPT | Decoder, padding: Tensor, capacity: int) -> None:
        self.model, self.padding, self.length = model, padding, 0  # padding: (B,) tokens per row
        self.caches = [KeyValueCache(capacity) for _ in model.blocks]

    def read(self, tokens: Tensor) -> Tensor:
        stop = self.length + tokens.shape[1]
        columns = torch.arange(stop, device=tokens.device)
        current = columns[self.length :, None]  # (T, 1)
        real = columns >= self.padding[:, None, None]  # (B, 1, S)
        # padding sees itself, because attention to nothing is undefined
        mask = (real & (columns <= current)) | (columns == current)  # (B, T, S)
        places = (current.T - self.padding[:, None]).clamp(min=0)  # (B, T)
        self.length = stop
        return self.model.next_logits(tokens, places, mask[:, None], self.caches)

    def keep(self, rows: Tensor) -> None:
        self.padding = self.padding[rows]
        for cache in self.caches:
            cache.keep(rows)


class HuggingFaceReader:
    """A reader for a Hugging Face model, with its own cache; all rows have the same length.

    A model without a key/value cache reads all tokens again at every step.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        self.seen: Tensor | None = None
        parameters = inspect.signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def read(self, tokens: Tensor) -> Tensor:
        self.seen = tokens if self.seen is None else torch.cat([self.seen, tokens], 1)
        output = self.model(
            input_ids=self.seen if self.cache is None else tokens,
            attention_mask=torch.ones_like(self.seen),
            past_key_values=self.cache,
            use_cache=True,
            **self.options,
        )
        self.cache = getattr(output, "past_key_values", None)
        return output.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        assert self.seen is not None
        self.seen = self.seen[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)


def position_limit(model: nn.Module) -> int | None:
    """Return the number of positions of a model; None if it has no known limit."""
    if isinstance(model, GPT):
        return model.config.positions
    if isinstance(model, Decoder):
        return None
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    for name, module in model.named_modules():
        table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if table and module.padding_idx is not None:  # RoBERTa's first position is padding_idx + 1
            return positions - int(module.padding_idx) - 1
    return positions


@torch.no_grad()
def continue_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: Collection[int] = (),
) -> list[list[Continuation]]:
    """Continue prompts of token ids with a causal language model; return each prompt's samples.

    The model should be in evaluation mode. A sample is the same in any batch, up to rounding. It
    ends at a token of `ends`, after `sampling.max_tokens` tokens, or when prompt and sample fill
    the model's positions.
    """
    if isinstance(model, GPT) and (model.config.classes or not model.config.causal):
        raise BadInput("generate: the model is not a causal language model")
    limit = position_limit(model)
    for prompt in prompts:
        if not prompt:
            raise BadInput("generate: a prompt should have at least one token")
        if limit is not None and len(prompt) >= limit:
            raise BadInput(
                f"generate: the prompt has {len(prompt)} tokens; the model has {limit} positions, "
                f"so a prompt can have at most {limit - 1}"
            )
    results: list[list[Continuation]] = [[] for _ in prompts]
    own = isinstance(model, GPT | Decoder)
    for indices, numbers in _batches([len(prompt) for prompt in prompts], sampling.samples, own):
        batch = _Batch(
            model, [prompts[index] for index in indices], numbers, sampling, limit, frozenset(ends)
        )
        for index, continuations in zip(indices, batch.run(), strict=True):
            results[index] += continuations
    return results


def _batches(
    lengths: Sequence[int], samples: int, mixed: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield batches of at most `_ROWS` samples: indices of prompts, and which samples of each.

    ([4, 7], [0, 1]) stands for the first two samples of prompt 4 and of prompt 7. Unless `mixed`,
    the prompts of a batch have the same length, because not every Hugging Face model gives the same
    logits for a padded row.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    groups: dict[int, list[int]] = {}
    for index in order:
        groups.setdefault(0 if mixed else lengths[index], []).append(index)
    at_once = max(1, _ROWS // samples)
    for group in groups.values():
        for start in range(0, len(group), at_once):
            for first in range(0, samples, _ROWS):
                numbers = list(range(first, min(first + _ROWS, samples)))
                yield group[start : start + at_once], numbers


class _Batch:
    """Samples that are generated together."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        sampling: Sampling,
        limit: int | None,
        ends: frozenset[int],
    ) -> None:
        self.sampling, self.ends = sampling, ends
        self.prompts, self.numbers = prompts, numbers  # numbers: which samples of each prompt
        self.device = next(model.parameters()).device
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        # the number of tokens that may follow each prompt
        self.room = [limit - length if limit else sampling.max_tokens for length in lengths]
        padding = torch.tensor([longest - length for length in lengths], device=self.device)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.tokens = torch.tensor(rows, device=self.device)  # (P, longest)
        self.reader: Reader
        if isinstance(model, GPT | Decoder):
            capacity = longest + min(max(self.room), sampling.max_tokens)
            self.reader = OwnReader(model, padding, capacity)
        else:
            self.reader = HuggingFaceReader(model)

    def run(self) -> list[list[Continuation]]:
        """Return the continuations of each prompt."""
        count, most = len(self.numbers), self.sampling.max_tokens
        logits = self.reader.read(self.tokens)
        if logits.isnan().any():
            raise BadInput("generate: the model's logits are not numbers; did training diverge?")
        # every prompt is read once, and then becomes as many rows as it has samples
        copies = torch.arange(len(self.prompts), device=self.device).repeat_interleave(count)
        self.reader.keep(copies)
        logits = logits[copies]
        drawn = np.stack([self.sampling.draws(number) for number in self.numbers])
        draws = torch.from_numpy(drawn).repeat(len(self.prompts), 1)  # (rows, max_tokens)
        active = list(range(len(draws)))  # rows that have not ended
        written: list[list[int]] = [[] for _ in active]
        ended: list[Ended] = ["length"] * len(active)
        for step in range(1, most + 1):
            chosen = choose(logits, self.sampling, draws[active, step - 1])
            stay: list[int] = []
            for index, token in enumerate(chosen.tolist()):
                row = active[index]
                written[row].append(token)
                if token in self.ends:
                    ended[row] = "end"
                elif step < most and step >= self.room[row // count]:
                    ended[row] = "positions"
                elif step < most:
                    stay.append(index)
            if not stay:
                break
            if len(stay) < len(active):
                rows = torch.tensor(stay, device=self.device)
                self.reader.keep(rows)
                chosen, active = chosen[rows], [active[index] for index in stay]
            logits = self.reader.read(chosen[:, None])
        made = [Continuation(tuple(t), e) for t, e in zip(written, ended, strict=True)]
        return [made[start : start + count] for start in range(0, len(made), count)]


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Choose a token from logits (B, vocabulary) with a random number from 0 to 1 per row.

    Top-p keeps the smallest set of most probable tokens whose probabilities sum to `top_p` or
    more; a token of this set is drawn by inverting its cumulative distribution.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.to(exact_dtype(logits.device))
    scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    ranked, order = _rank(scores.softmax(-1), sampling.top_p)
    if sampling.top_p < 1:
        ranked = ranked * (ranked.cumsum(-1) - ranked < sampling.top_p)
    cumulative = ranked.cumsum(-1)
    target = draws.to(ranked)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # rounding can give an index after the last token of the set
    index = index.minimum((ranked > 0).sum(-1, keepdim=True) - 1)
    return order.gather(-1, index).squeeze(-1)


def _rank(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return probabilities in descending order and their tokens; ties are in order of tokens.

    If `_CANDIDATES` tokens hold `top_p`, the others are left out, because sorting a whole
    vocabulary is slow.
    """
    if top_p < 1 and probabilities.shape[-1] > _CANDIDATES:
        top, tokens = probabilities.topk(_CANDIDATES, sorted=False)
        # tokens that are as probable as the last candidate may be missing
        certain = top * (top > top.amin(-1, keepdim=True))
        if bool((certain.sum(-1) > top_p + _MARGIN).all()):
            tokens = tokens.sort(dim=-1).values
            top = probabilities.gather(-1, tokens)
            ranked, order = top.sort(dim=-1, descending=True, stable=True)
            return ranked, tokens.gather(-1, order)
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    return ranked, order


def continue_texts(
    model: nn.Module, encoder: Encoder, tokenizer: Any, prompts: Sequence[str], sampling: Sampling
) -> list[Sample]:
    """Continue texts with a model in evaluation mode; return all samples, prompt by prompt.

    An empty prompt begins a new text: the model reads the end token, which separates the texts in
    training. `tokenizer` is the encoder's tokenizer as an object of transformers.
    """
    encoded = [ids or [encoder.end] for ids in encoder.running(list(prompts))]
    ends = {encoder.end} | _configured_ends(model)
    continued = continue_prompts(model, encoded, sampling, ends=ends)
    return [
        Sample(
            prompt,
            _text(tokenizer, ids if prompt else [], continuation),
            continuation.tokens,
            continuation.ended,
        )
        for prompt, ids, continuations in zip(prompts, encoded, continued, strict=True)
        for continuation in continuations
    ]


def _configured_ends(model: nn.Module) -> set[int]:
    """Return the end tokens in the generation config of a Hugging Face model."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def _text(tokenizer: Any, prompt: Sequence[int], continuation: Continuation) -> str:
    """Decode a continuation, with the space before it if there is one, and without its end token.

    A character may begin in the prompt and end in the continuation; then the tokens of
    the continuation are decoded alone.
    """
    tokens = list(continuation.tokens)
    if continuation.ended == "end":
        tokens.pop()
    before, whole = (tokenizer.decode(list(ids)) for ids in (prompt, [*prompt, *tokens]))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)
