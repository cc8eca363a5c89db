"""Inputs for one small forward pass of any model, guessed from its config, signature and weights.

`candidate_inputs` offers calls to try, the most complete and most likely first. The values are
drawn from a separate generator, so the caller's random state does not move. To count how many
tokens an image or a sound becomes, the model's own `get_image_features` or `get_audio_features`
is run, so pass a copy of the model in eval mode: its own code may change its buffers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.roles.tracing.passes.facts import (
    BATCH,
    LENGTH,
    TARGET_LENGTH,
    Arguments,
    Call,
    Facts,
    Values,
    first_embedding,
    parameters_of,
    takes_name,
)

MOST_CALLS = 12  # most guesses that are tried
LONGEST = 4096  # a table with more rows than this is not taken for a table of positions
_TEXT_NAMES = ("input_ids", "idx", "ids", "tokens", "token_ids", "inputs_ids", "text")


def candidate_inputs(model: nn.Module) -> Iterator[Call]:
    """Offer calls of the model's forward in the order to try them; most have two samples."""
    seen: list[str] = []
    for call in _all_calls(model):
        key = _outline(call)
        if key not in seen:
            seen.append(key)
            yield call


def no_inputs(model: nn.Module, problem: str, began: bool) -> str:
    """Say in one line why no forward pass succeeded, and how to give a batch.

    Args:
        problem: the error of the guess that came furthest, in parentheses.
        began: whether that guess reached the model's weights.
    """
    maker = _Named(model)
    unknown = [name for name in maker.required if not maker.can_make(name)]
    if began and len(maker.required) == 1:
        unknown = []  # guessed from the first weights
    name = (unknown or maker.required or [maker.main or "inputs"])[0]
    batch = f"{{{name!r}: tensor}}" if takes_name(model.forward, name) else "(tensor,)"
    read = f"read the model on a small batch first, fl.anatomy(model, {batch})"
    if not unknown and problem:
        return f"its forward pass fails on guessed inputs{problem}; if it needs others, {read}"
    return f"cannot guess `{name}` of {type(model).__name__}.forward{problem}; {read}"


def _all_calls(model: nn.Module) -> Iterator[Call]:
    yield from torch_modules(model)
    named = _Named(model)
    if named.config is not None:
        yield from named.hugging_face()
    yield from ByWeights(model).by_weights()


def _outline(call: Call) -> str:
    def outline(value: Any) -> str:
        if isinstance(value, Tensor):
            special = "" if value.is_floating_point() or value.is_meta else value.tolist()
            return f"{value.dtype}{tuple(value.shape)}{special if value.ndim < 3 else ''}"
        return repr(value)

    parts = [outline(value) for value in call.args]
    return repr(parts + [f"{name}={outline(call.kwargs[name])}" for name in sorted(call.kwargs)])


class _Named(Facts):
    """Calls of a Hugging Face model by the names of its arguments."""

    def hugging_face(self) -> Iterator[Call]:
        """Offer calls by the names of the arguments, text with images and sound first."""
        if self.main in self.parameters and self.main not in self.required:
            self.required = [self.main, *self.required]
        if "input_ids" in self.parameters:
            yield from islice(self.mixed(), MOST_CALLS - 1)  # text alone is tried, too
        if "pixel_values_videos" in self.required:
            frames = self.number("num_frames", "frames_per_clip", default=4)
            for shape in ((BATCH, frames), (BATCH, 16)):
                yield self.finished({"pixel_values_videos": self.images(*shape)})
        if {"pixel_values", "hidden_states"} & set(self.required):
            for images in self.image_arguments():
                yield self.finished(images)
        if {"input_features", "input_values", "audio_mel"} & set(self.required):
            for sound in self.sound_arguments():
                yield self.finished(sound)
        if "past_values" in self.parameters:
            for series in self.series():
                yield self.finished(series)
        if "input_ids" in self.parameters:
            yield self.finished({"input_ids": self.ids()})
        if "inputs_embeds" in self.parameters:
            width = self.number("hidden_size", "d_model", default=0)
            if width:
                yield self.finished({"inputs_embeds": self.draw.sequence(LENGTH, width)})
        yield self.finished({})
        dummy = getattr(self.model, "dummy_inputs", None)
        if isinstance(dummy, Mapping):
            yield self.finished(
                {
                    name: value.to(self.draw.device) if isinstance(value, Tensor) else value
                    for name, value in dummy.items()
                    if name in self.parameters
                }
            )

    def mixed(self) -> Iterator[Call]:
        """Offer text with placeholders for the vectors that the model makes of images and sound."""
        images = self.counted("image", self.image_arguments())
        sounds = self.counted("audio", self.sound_arguments())
        if images and sounds:
            yield self.interleaved([images[0], sounds[0]])
        for item in [*images, *sounds]:
            yield self.interleaved([item])
        if not images:
            for made in self.image_arguments():
                yield self.finished({"input_ids": self.ids()} | made)
        token = self.fact("audio_token_id", "audio_token_index")
        if not sounds and isinstance(token, int):  # one token stands for all features
            for made in self.sound_arguments():
                yield self.interleaved([(made, token, 1)])
        if not sounds:
            for made in self.sound_arguments():
                yield self.finished({"input_ids": self.ids()} | made)

    def counted(
        self, kind: str, offers: Iterator[Arguments]
    ) -> list[tuple[Arguments, int | None, int]]:
        """Return at most two offers that the model can turn into features.

        With each: the id of the placeholder token, if any, and how often a sample has this token.
        """
        method = self.feature_method(kind)
        if method is None:
            return []
        names = parameters_of(method)
        token = self.fact(f"{kind}_token_id", f"{kind}_token_index")
        token = token if isinstance(token, int) else None
        good: list[tuple[Arguments, int | None, int]] = []
        for made in offers:
            taken = {name: value for name, value in made.items() if name in names}
            count = _features(method, taken)
            if count is not None and count == BATCH:  # one vector for a whole image
                good.append((made, token, self.number("num_query_tokens", default=1)))
            elif count is not None:
                good.append((made, token, count // BATCH))
            if len(good) == 2:
                break
        return good

    def interleaved(self, items: list[tuple[Arguments, int | None, int]]) -> Call:
        """Return a call of text with images or sound, at the places of their placeholder tokens.

        Args:
            items: what `counted` returns: arguments, the placeholder's id, and how often it occurs.
        """
        pieces, kinds = [self.ids(3)], [0, 0, 0]
        made: Arguments = {}
        for number, (arguments, token, count) in enumerate(items, 1):
            made |= arguments
            if "image_embeds_position_mask" in self.parameters:
                pieces.append(self.ids(count + 2))
                places = [0, 0, 0] + [1] * count + [0, 0, 0]
                made["image_embeds_position_mask"] = self.draw.constant([places] * BATCH)
            if token is None:
                continue
            pieces += [self.draw.constant([[token] * count] * BATCH), self.ids(2)]
            kind = 1 if "pixel_values" in arguments else number + 2
            kinds += [kind] * count + [0, 0]
        ids = torch.cat([*pieces, self.ids(1)], dim=1)
        if len(pieces) == 1:
            ids, kinds = self.ids(), [0] * (LENGTH - 1)
        kinds = [*kinds, 0]
        for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
            if name in self.parameters and (name.endswith("mm_token_type_ids") or any(kinds)):
                made[name] = self.draw.constant([kinds] * BATCH)
        return self.finished({"input_ids": ids} | made)

    def finished(self, made: Arguments) -> Call:
        """Return a call with these arguments, the required ones and those that some models need."""
        made = dict(made)
        wanted = [name for name in self.required if name not in made]
        if "decoder_input_ids" in self.parameters:
            wanted.append("decoder_input_ids")
        if "bbox" in self.parameters and "input_ids" in made:
            wanted.append("bbox")
        if "feature_attention_mask" in made and "input_ids" in made:
            wanted.append("attention_mask")
        wanted += [name for name in ("visual_feats", "visual_pos") if name in self.parameters]
        for name in wanted:
            value = self.argument(name, made)
            if value is not None:
                made[name] = value
        if "use_cache" in self.parameters:
            made["use_cache"] = False
        return Call(kwargs=made)

    def series(self) -> Iterator[Arguments]:
        """Offer a time series: one value a step, or a value of every channel."""
        past = self.number("context_length", "prediction_length", default=16)
        future = self.number("prediction_length", "horizon_length", default=8)
        lags = self.fact("lags_sequence")
        total = past + (max(lags) if isinstance(lags, (list, tuple)) and lags else 0)
        channels = self.number("num_input_channels", "input_size", default=1)
        features = self.fact("num_time_features") or 0
        shape = (BATCH, total) if channels == 1 else (BATCH, total, channels)
        made: Arguments = {"past_values": self.draw.floats(*shape)}
        extra: Arguments = {
            "past_time_features": self.draw.floats(BATCH, total, int(features)),
            "past_observed_mask": self.draw.ones(*shape, dtype=torch.bool),
            "future_values": self.draw.floats(BATCH, future, *shape[2:]),
            "future_time_features": self.draw.floats(BATCH, future, int(features)),
        }
        if "past_time_features" in self.required:
            yield made | extra
        yield made
        yield {"past_values": self.draw.floats(BATCH, total, channels)}
        yield {"past_values": [self.draw.floats(total) for _ in range(BATCH)]}

    def argument(self, name: str, made: Arguments) -> Any:
        """Return a value for an argument of this name, or None if the name is unknown."""
        ids = made.get("input_ids")
        length = ids.shape[1] if isinstance(ids, Tensor) else LENGTH
        if name == "decoder_input_ids":
            return self.ids(TARGET_LENGTH, self.decoder_vocabulary())
        if name.endswith("input_ids"):
            return self.ids(length)
        if name.endswith("inputs_embeds") or name in ("query_embeds", "noise_embeds"):
            return self.draw.sequence(LENGTH, self.number("hidden_size", "d_model", default=32))
        if name in ("encoder_hidden_states", "context_hidden_states", "hidden_states"):
            return self.draw.sequence(
                TARGET_LENGTH, self.number("hidden_size", "d_model", default=32)
            )
        if name == "bbox":
            corners = self.draw.constant([[1, 2, 5, 9], [2, 3, 8, 12], [3, 1, 7, 4]])
            return corners.repeat(length, 1)[:length].expand(BATCH, -1, -1).contiguous()
        if name.endswith("attention_mask"):
            return self.draw.ones(BATCH, length)
        if name.startswith("pixel_values"):
            return self.images()
        if name == "input_values":
            return next(self.samples())
        if name == "input_features":
            return next(self.features())[0]
        if name == "latents":
            return self.draw.floats(
                BATCH, self.number("hidden_size", "latent_dim", default=32), LENGTH
            )
        if name == "inputs":
            return self.draw.sequence(LENGTH, self.number("d_model", "hidden_size", default=32))
        if name == "visual_feats":
            return self.draw.sequence(TARGET_LENGTH, self.number("visual_feat_dim", default=32))
        if name == "visual_pos":
            return self.draw.sequence(TARGET_LENGTH, 4)
        if name == "freq":
            return self.draw.constant([[0]] * BATCH)
        if name == "past_values_padding":
            return torch.zeros_like(made["past_values"]) if "past_values" in made else None
        return None

    def decoder_vocabulary(self) -> int | None:
        size = self.fact("decoder_vocab_size")
        decoder = getattr(self.model, "decoder", None)
        if not isinstance(size, int) and isinstance(decoder, nn.Module):
            size = first_embedding(decoder)
        return size if isinstance(size, int) and size > LENGTH else None

    def can_make(self, name: str) -> bool:
        if self.config is not None and name in (
            "pixel_values",
            "past_values",
            "input_ids",
            "grid_thw",
        ):
            return True
        return self.argument(name, {}) is not None or name in _TEXT_NAMES


def _features(method: Callable[..., Any], arguments: Arguments) -> int | None:
    """Return how many feature vectors the model makes of these, or None if it makes none."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = method(**arguments)
    except Exception:  # this layout is not the model's: the next one is tried
        return None
    pooled = getattr(result, "pooler_output", None)
    if pooled is None and not isinstance(result, (Tensor, list, tuple)):
        pooled = getattr(result, "last_hidden_state", None)
    return _vectors(result if pooled is None else pooled)


def _vectors(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel() // value.shape[-1] if value.ndim > 0 and value.shape[-1] else None
    if isinstance(value, (list, tuple)) and value:
        counts = [_vectors(item) for item in value]
        return sum(count for count in counts if count is not None)
    return None


def torch_modules(model: nn.Module) -> Iterator[Call]:
    """Offer inputs of torch's own transformer modules, which take embedded sequences."""
    draw = Values(model)
    if isinstance(model, nn.MultiheadAttention):
        first = model.batch_first
        query = draw.sequence(LENGTH, model.embed_dim, first)
        key = draw.sequence(TARGET_LENGTH, model.kdim or model.embed_dim, first)
        value = draw.sequence(TARGET_LENGTH, model.vdim or model.embed_dim, first)
        yield Call((query, key, value), {"need_weights": False})
    elif isinstance(model, nn.Transformer):
        width, first = model.d_model, model.batch_first
        yield Call(
            (draw.sequence(LENGTH, width, first), draw.sequence(TARGET_LENGTH, width, first))
        )
    elif isinstance(
        model,
        nn.TransformerEncoder
        | nn.TransformerEncoderLayer
        | nn.TransformerDecoder
        | nn.TransformerDecoderLayer,
    ):
        attention = next(
            part for part in model.modules() if isinstance(part, nn.MultiheadAttention)
        )
        width, first = attention.embed_dim, attention.batch_first
        inputs = [draw.sequence(LENGTH, width, first)]
        if isinstance(model, nn.TransformerDecoder | nn.TransformerDecoderLayer):
            inputs.append(draw.sequence(TARGET_LENGTH, width, first))
        yield Call(tuple(inputs))


@dataclass(frozen=True)
class _Sketch:
    """An input in outline: its sizes after the batch, None where a length is free."""

    kind: str
    shape: tuple[int | None, ...]
    words: int = 0  # size of the vocabulary that ids are drawn from; 0: floats


class ByWeights(Facts):
    """Calls with arguments that are guessed from the first weights of a model."""

    def by_weights(self) -> Iterator[Call]:
        """Offer arguments, guessed from the first weights and from the first argument's name."""
        names = self.required or list(self.parameters)[:1]
        if not names or len(names) > 3:
            return
        for sketch in self.first_inputs(names[0]):
            if len(names) > 1:
                lengths = (LENGTH, TARGET_LENGTH, TARGET_LENGTH)[: len(names)]
                yield self.given(names, [self.drawn(sketch, length) for length in lengths])
            yield self.given(names, [self.drawn(sketch, LENGTH) for _ in names])

    def given(self, names: list[str], values: list[Tensor]) -> Call:
        """Return a call by position or, if an argument can only be given by name, by names."""
        if any(self.parameters[name].kind is Parameter.KEYWORD_ONLY for name in names):
            return Call(kwargs=dict(zip(names, values, strict=True)))
        return Call(tuple(values))

    def drawn(self, sketch: "_Sketch", length: int) -> Tensor:
        shape = [length if size is None else size for size in sketch.shape]
        if sketch.words:
            return self.draw.choice(range(min(3, sketch.words - 1), sketch.words), BATCH, *shape)
        return self.draw.floats(BATCH, *shape)

    def first_inputs(self, name: str) -> list["_Sketch"]:
        """Return what the first layers with weights can take, the likeliest first."""
        parts = list(self.model.modules())
        sketches: list[_Sketch] = []
        tables = [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]
        tables = [size for size in tables if size > LENGTH] or tables
        positions = self.positions()
        if tables:
            sketches += [_Sketch("ids", (None,), words) for words in (tables[0], min(tables))]
            exact = [size for size in tables[1:] if size <= LONGEST] + positions
            sketches += [_Sketch("ids", (length,), tables[0]) for length in exact]
        for part in [part for part in parts if isinstance(part, nn.Conv2d)][:1]:
            for height, width in self.own_image_sizes(part):
                sketches.append(_Sketch("image", (part.in_channels, height, width)))
        for channels in [part.in_channels for part in parts if isinstance(part, nn.Conv1d)][:1]:
            for length in (64, 400, 1600, 16000):
                sketches.append(_Sketch("sound", (channels, length)))
        widths = [part.in_features for part in parts if isinstance(part, nn.Linear)][:3]
        widths += [part.normalized_shape[-1] for part in parts if isinstance(part, nn.LayerNorm)][
            :1
        ]
        weight = next((item for item in self.model.parameters() if item.ndim == 2), None)
        widths += [] if weight is None else [weight.shape[1], weight.shape[0]]
        for width in widths:
            sketches += [_Sketch("floats", (length, width)) for length in (None, *positions)]
        first = _first_kind(self.model)
        if any(word in name.lower() for word in ("ids", "idx", "token")):
            first = "ids"
        elif any(word in name.lower() for word in ("image", "img", "pixel")):
            first = "image"
        return sorted(dict.fromkeys(sketches), key=lambda sketch: sketch.kind != first)

    def positions(self) -> list[int]:
        """Return possible lengths of position tables: of parameters with `pos` in their names."""
        return [
            item.shape[-2]
            for name, item in self.model.named_parameters()
            if "pos" in name.lower() and item.ndim in (2, 3) and 1 < item.shape[-2] <= LONGEST
        ]

    def own_image_sizes(self, conv: nn.Conv2d) -> Iterator[tuple[int, int]]:
        """Offer image sizes from the model's own attributes, its position table, and usual ones."""
        for name in ("pretrained_cfg", "default_cfg"):
            settings = getattr(self.model, name, None)
            if isinstance(settings, Mapping) and len(settings.get("input_size") or ()) == 3:
                yield settings["input_size"][1], settings["input_size"][2]
        for owner in (self.model, *self.model.children()):
            for name in ("img_size", "image_size", "input_size"):
                size = getattr(owner, name, None)
                if isinstance(size, int):
                    yield size, size
                elif (
                    isinstance(size, (list, tuple)) and len(size) >= 2 and isinstance(size[-1], int)
                ):
                    yield size[-2], size[-1]
        patch = int(conv.stride[0])
        for count in self.positions():
            for extra in (1, 0, 2):
                side = math.isqrt(max(count - extra, 0))
                if side and side * side == count - extra:
                    yield side * patch, side * patch
        for side in (32, 64, 224):
            yield side, side


def _first_kind(model: nn.Module) -> str:
    """Say what the first layer with weights takes."""
    for part in model.modules():
        for kind, word in (
            (nn.Embedding, "ids"),
            (nn.Conv2d, "image"),
            (nn.Conv1d, "sound"),
            (nn.Linear, "floats"),
        ):
            if isinstance(part, kind):
                return word
    return "floats"
