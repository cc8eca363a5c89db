"""What a model's config, signature and weights say about its inputs, and inputs that fit."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TARGET_LENGTH = 2, 6, 5  # samples; tokens; tokens of a second sequence
Arguments = dict[str, Any]
_MELS = (  # names in configs for the number of features per frame of sound
    "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_projection_input_dim",
    "input_feat_size", "mel_bins", "feat_dim", "feature_size", "mel_dim", "input_dim", "input_size",
    "num_mels", "feature_dim", "in_channels", "num_features", "input_channels",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The arguments of one forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def copied(self) -> "Call":
        """Return a call with copies of the arguments, into which a forward pass may write."""
        args, kwargs = replaced((tuple(self.args), dict(self.kwargs)), _copied)
        return Call(args, kwargs)


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with every leaf changed."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    return change(value)


def _copied(value: Any) -> Any:
    """Return a copy of an argument; what cannot be copied, and a model, is returned as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, nn.Module):
        return value
    with suppress(Exception):  # an object's own code can fail in many ways
        return copy.deepcopy(value)
    return value


class Values:
    """Random values on the model's device, from a generator of their own."""

    def __init__(self, model: nn.Module) -> None:
        first = next(
            (item for item in model.parameters() if item.is_floating_point()),
            torch.empty(0),
        )
        self.device, self.dtype = first.device, first.dtype
        self.generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def sequence(self, length: int, width: int, batch_first: bool = True) -> Tensor:
        return self.floats(*((BATCH, length) if batch_first else (length, BATCH)), width)

    def choice(self, allowed: Sequence[int], *shape: int) -> Tensor:
        """Return integers drawn from those allowed, all different if there are enough."""
        count = math.prod(shape)
        order = torch.randperm(len(allowed), generator=self.generator)
        order = order.repeat(-(-count // len(allowed)))[:count]
        return torch.tensor(allowed)[order].view(shape).to(self.device)

    def constant(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)


class Facts:
    """What is known about a model's inputs, and arguments that fit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self.draw = Values(model)
        config = getattr(self.model, "config", None)
        self.config = config if hasattr(config, "model_type") else None
        self.parameters = parameters_of(self.model.forward)
        self.required = [
            name
            for name, item in self.parameters.items()
            if item.default is inspect.Parameter.empty
        ]
        main = getattr(self.model, "main_input_name", None)
        self.main = main if isinstance(main, str) else next(iter(self.parameters), None)
        self.configs = list(_configs(self.config)) if self.config is not None else []

    # ---- facts of the config ----

    def fact(self, *names: str, within: Sequence[Any] | None = None) -> Any:
        """Return the first of these attributes that a config has; strings do not count."""
        for name in names:
            for config in self.configs if within is None else within:
                value = _attribute(config, name)
                if value is not None and not isinstance(value, str):
                    return value
        return None

    def number(self, *names: str, default: int, within: Sequence[Any] | None = None) -> int:
        """Return `fact` if it is a positive integer, else `default`; of a list, its first entry."""
        value = self.fact(*names, within=within)
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return value if isinstance(value, int) and value > 0 else default

    def part(self, *words: str) -> list[Any]:
        """Return the sub-configs whose name has one of these words, or else all configs."""
        chosen = [
            config
            for config in self.configs
            if any(word in str(getattr(config, "model_type", "")).lower() for word in words)
            or any(word in name for name in _names_in(self.config, config) for word in words)
        ]
        return chosen or self.configs

    # ---- text ----

    def special_ids(self) -> set[int]:
        ids: set[int] = set()
        for config in self.configs:
            for name, value in vars(config).items():
                if name.endswith(("_token_id", "_token_index", "_token_ids")):
                    values = value if isinstance(value, (list, tuple)) else [value]
                    ids |= {item for item in values if isinstance(item, int)}
        return ids

    def vocabulary(self) -> int:
        embeddings: Any = getattr(self.model, "get_input_embeddings", lambda: None)
        try:
            embedding = embeddings()
        except (NotImplementedError, AttributeError, TypeError):
            embedding = None
        size = getattr(embedding, "num_embeddings", None)
        if not isinstance(size, int):
            size = self.number(
                "vocab_size", default=0, within=self.part("text")
            ) or first_embedding(self.model)
        return size or 10

    def allowed_ids(self, size: int | None = None) -> list[int]:
        size = size or self.vocabulary()
        known = self.fact("vocab_size", within=self.part("text"))
        if isinstance(known, int) and 0 < known < size:
            size = known
        ids = [i for i in range(3, min(size, 1000)) if i not in self.special_ids()]
        return ids or list(range(size))

    def ids(self, length: int = LENGTH, size: int | None = None) -> Tensor:
        return self.draw.choice(self.allowed_ids(size), BATCH, length)

    # ---- images ----

    def image_size(self) -> tuple[int, int]:
        vision = self.part("vision", "image", "visual", "backbone", "vit")
        value = self.fact("image_size", "img_size", "input_size", within=vision)
        if isinstance(value, Mapping):
            value = (value.get("height"), value.get("width"))
        if isinstance(value, (list, tuple)) and len(value) >= 2:
            return int(value[-2]), int(value[-1])
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and value > 1:
            return value, value
        patch = self.number("patch_size", default=8, within=vision)
        return patch * 4, patch * 4

    def channels(self) -> int:
        vision = self.part("vision", "image", "visual", "backbone")
        return self.number(
            "num_channels", "in_channels", "in_chans", "channels", default=3, within=vision
        )

    def images(self, *leading: int) -> Tensor:
        return self.draw.floats(*(leading or (BATCH,)), self.channels(), *self.image_size())

    def grid(self) -> tuple[int, int]:
        """Return the height and width, in patches, of an image given as a list of patches."""
        vision = self.part("vision", "image", "visual")
        merge = self.number(
            "spatial_merge_size", "merge_size", "merge_kernel_size", default=2, within=vision
        )
        return 2 * merge, 2 * merge

    def patch_values(self) -> int:
        """Return how many numbers an image patch in a list of patches has."""
        vision = self.part("vision", "image", "visual")
        patch = self.number("patch_size", default=8, within=vision)
        times = self.number(
            "temporal_patch_size", "patch_temporal", "tubelet_size", default=1, within=vision
        )
        return self.channels() * times * patch * patch

    def pixel_layouts(self) -> Iterator[Arguments]:
        """Offer images in the forms that models take: images, lists of patches, videos."""
        names = self.image_names()
        height, width = self.grid()
        count = height * width
        if any("grid" in name for name in names) or "hidden_states" in self.required:
            yield {"pixels": self.draw.floats(BATCH * count, self.patch_values())}
        if "spatial_shapes" in names:
            yield {
                "pixels": self.draw.floats(BATCH, count, self.patch_values()),
                "pixel_attention_mask": self.draw.ones(BATCH, count),
            }
        if "aspect_ratio_ids" in names:
            tiles = self.number("max_num_tiles", default=4)
            yield {
                "pixels": self.images(BATCH, 1, tiles),
                "cross_attention_mask": self.draw.ones(BATCH, LENGTH, 1, tiles),
            }
        crops = self.crops()
        if crops and "image_sizes" in names:
            yield {"pixels": self.images(BATCH, crops)}
        frames = self.number("num_frames", default=0)  # of a video
        if frames:
            yield {"pixels": self.images(BATCH, frames)}
        if "pixel_attention_mask" in names:
            yield {
                "pixels": self.images(BATCH, 1),
                "pixel_attention_mask": self.draw.ones(BATCH, 1, *self.image_size()),
            }
        yield {"pixels": self.images()}
        if not frames:
            yield {"pixels": self.images(BATCH, 1)}
            yield {"pixels": self.images(BATCH, 2)}
        yield {"pixels": self.draw.floats(BATCH, count, self.patch_values())}

    def crops(self) -> int:
        """Count an image of the first allowed shape and its crops; 0 if the model has no crops."""
        shapes = self.fact("image_grid_pinpoints")
        if not isinstance(shapes, (list, tuple)) or not shapes:
            return 0
        height, width = self.image_size()
        return 1 + (shapes[0][0] // height) * (shapes[0][1] // width)

    def feature_method(self, kind: str) -> Callable[..., Any] | None:
        """Return `get_image_features` or `get_audio_features` of the model or of a child."""
        for part in (self.model, *self.model.children()):
            method = getattr(part, f"get_{kind}_features", None)
            if callable(method):
                return method
        return None

    def image_names(self) -> list[str]:
        names = list(self.parameters)
        method = self.feature_method("image")
        return names if method is None else names + list(parameters_of(method))

    def image_companion(self, name: str, pixels: Tensor) -> Any:
        """Return a value for an argument that describes or accompanies the images, or None."""
        height, width = self.grid()
        size = self.image_size()
        many = pixels.shape[1] if pixels.ndim == 5 else 1
        flat = pixels.ndim < 4
        if name in ("image_grid_thw", "grid_thw", "image_grid_hw"):
            row = [height, width] if name.endswith("_hw") else [1, height, width]
            return self.draw.constant([row] * BATCH)
        if name in ("spatial_shapes", "target_sizes"):
            return self.draw.constant([[height, width]] * BATCH)
        if name in ("image_merge_sizes", "merge_sizes"):
            return self.draw.constant(
                [self.number("spatial_merge_size", "merge_size", default=1)] * BATCH
            )
        if name == "image_sizes":
            if self.crops() and many > 1:
                size = tuple(self.fact("image_grid_pinpoints")[0])
            return self.draw.constant([list(size)] * BATCH)
        if name == "pixel_mask" and not flat:
            return self.draw.ones(BATCH, *size)
        if name == "pixel_attention_mask":
            return self.draw.ones(BATCH, many, *size) if many > 1 else self.draw.ones(BATCH, *size)
        if name in ("pixel_position_ids", "image_position_ids"):
            if not flat:
                return None
            rows = torch.arange(height).repeat_interleave(width)
            columns = torch.arange(width).repeat(height)
            return torch.stack([columns, rows], -1).expand(BATCH, -1, -1).to(self.draw.device)
        if name in ("high_res_pixel_values", "prompt_pixel_values"):
            return self.draw.floats(*pixels.shape)
        if name == "prompt_masks":
            return self.draw.floats(*pixels.shape)
        if name == "aspect_ratio_ids":
            return self.draw.ones(BATCH, many)
        if name == "aspect_ratio_mask":
            return self.draw.ones(BATCH, many, self.number("max_num_tiles", default=4))
        return None

    def image_arguments(self) -> Iterator[Arguments]:
        """Offer arguments for images: in each layout, first the required ones, then all."""
        name = next(
            (key for key in ("pixel_values", "hidden_states") if key in self.parameters), None
        )
        if name is None:
            return
        wanted = set(self.required)
        method = self.feature_method("image")
        if method is not None:
            features = parameters_of(method)
            wanted |= {
                key for key, item in features.items() if item.default is inspect.Parameter.empty
            }
            wanted |= {key for key in features if "grid" in key or key == "spatial_shapes"}
        wanted |= {key for key in self.parameters if key.startswith("aspect_ratio")}
        for layout in self.pixel_layouts():
            pixels = layout.pop("pixels")
            for names in (wanted, set(self.parameters)):
                made: Arguments = {name: pixels}
                for key in self.parameters:
                    if key in names and key != name:
                        value = layout.get(key)
                        value = self.image_companion(key, pixels) if value is None else value
                        if value is not None:
                            made[key] = value
                made |= {key: value for key, value in layout.items() if key in self.parameters}
                yield made

    # ---- sound ----

    def sound_arguments(self) -> Iterator[Arguments]:
        """Offer features or samples of sound, with their masks."""
        for name in ("input_features", "audio_mel", "audio_input_features"):
            if name in self.parameters:
                for features, frames in self.features():
                    yield from self.with_masks({name: features}, frames)
        if "input_values" in self.parameters:
            for values in self.samples():
                yield from self.with_masks({"input_values": values}, values.shape[-1])

    def features(self) -> Iterator[tuple[Tensor, int]]:
        """Offer features of sound, such as spectrograms, each with its number of frames."""
        sound = self.part("audio", "speech", "sound", "encoder")
        width = self.number(*_MELS, default=80, within=sound)
        exact = self.fact("max_source_positions", within=sound)
        frames = [2 * exact] if isinstance(exact, int) and exact <= 3000 else []
        for length in [*frames, 64, 200]:
            pair = [self.draw.floats(BATCH, width, length), self.draw.floats(BATCH, length, width)]
            if not self.convolves(width):
                pair.reverse()
            for features in pair:
                yield features, length
        for length in (64, 1024):
            yield self.draw.floats(BATCH, 1, length, width), length

    def convolves(self, width: int) -> bool:
        return any(
            isinstance(part, nn.Conv1d) and part.in_channels == width
            for part in self.model.modules()
        )

    def samples(self) -> Iterator[Tensor]:
        """Offer samples of sound or, where the config counts them, features of its frames."""
        strides = self.fact("conv_stride")
        lengths = [1600, 6400, 16000]
        if isinstance(strides, (list, tuple)):
            lengths.insert(0, math.prod(strides) * 16 + 64)
        bins, frames = self.fact("num_mel_bins"), self.fact("max_length")
        if isinstance(bins, int) and isinstance(frames, int):
            yield self.draw.floats(BATCH, frames, bins)
        ratios = self.fact("upsampling_ratios", "downsampling_ratios")
        hop = self.number("hop_length", "hop_size", default=0)
        if isinstance(ratios, (list, tuple)):
            hop = max(hop, math.prod(ratios) * 2)
        if hop:
            lengths.insert(0, hop * 4)
        channels = self.number("audio_channels", default=0)
        for length in lengths:
            shapes: list[tuple[int, ...]] = [(BATCH, length), (BATCH, 1, length)]
            if channels or hop:
                shapes = [(BATCH, channels or 1, length), (BATCH, length)]
            for shape in shapes:
                yield self.draw.floats(*shape)
        if isinstance(bins, int):
            yield self.draw.floats(BATCH, 64, bins)

    def with_masks(self, made: Arguments, length: int) -> Iterator[Arguments]:
        """Offer these arguments with only the required masks, and with all; the likelier first."""
        names = [
            name
            for name in (
                "input_features_mask",
                "feature_attention_mask",
                "audio_mel_mask",
                "padding_mask",
            )
            if name in self.parameters
        ]
        needed = [name for name in names if name in self.required]
        masks = {
            name: self.draw.ones(BATCH, length, dtype=torch.bool if "mel" in name else torch.long)
            for name in names
        }
        if "audio_mel_mask" in masks:  # it is True where a frame is missing
            masks["audio_mel_mask"] = ~masks["audio_mel_mask"]
        plain = made | {name: masks[name] for name in needed}
        if self.feature_method("audio") is not None:
            yield made | masks
            yield plain
        else:
            yield plain
            yield made | masks


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper: compiled, data-parallel, PEFT's or one of the user's."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module) and set(parameters_of(model.forward)) == set():
            inner = model._modules.get("module")
            base: Any = getattr(model, "get_base_model", lambda: None)
            inner = base() if inner is None else inner
            parts = [part for part in model.children() if next(part.parameters(), None) is not None]
            inner = parts[0] if inner is None and len(parts) == 1 else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {
        name: item
        for name, item in signature.parameters.items()
        if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
    }


def takes_name(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument of this name, perhaps in its `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    kinds = [item.kind for item in parameters.values()]
    return name in parameters_of(function) or inspect.Parameter.VAR_KEYWORD in kinds


def _configs(config: Any) -> Iterator[Any]:
    """Yield the config and its sub-configs, outer ones first."""
    queue = [config]
    while queue:
        current = queue.pop(0)
        yield current
        queue += [value for value in vars(current).values() if hasattr(value, "model_type")]


def _attribute(config: Any, name: str) -> Any:
    """Return an attribute of a config, or None if it has none."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses attributes that differ between layers
        return vars(config).get(name)


def _names_in(config: Any, wanted: Any) -> list[str]:
    """Return the attribute names under which a sub-config is found."""
    return [
        name for owner in _configs(config) for name, value in vars(owner).items() if value is wanted
    ]


def first_embedding(model: nn.Module) -> int:
    """Return the number of rows of the first embedding; 0 if there is none."""
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    return sizes[0] if sizes else 0
