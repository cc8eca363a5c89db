"""A small copy has every kind of layer of the original and the same attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

import frostlab as fl
from blocks import IDS, WIDTH, Block, Mix, apart, attend
from cases import slow_unless
from frostlab.roles.tracing.passes.inputs import candidate_inputs
from frostlab.roles.tracing.passes.small import LARGEST, Small, small_copy

FAST = ("bert", "clip", "gpt2", "gemma2", "t5", "vit")
SAMPLE = (
    *FAST, "albert", "bart", "bloom", "camembert", "codegen", "deepseek_v3", "dinov2", "distilbert",
    "electra", "falcon", "gemma3_text", "gpt_neo", "gpt_neox", "gpt_oss", "granite", "jamba",
    "kimi_linear", "llama", "llama4_text", "marian", "mbart", "mistral", "mixtral", "mllama",
    "modernbert", "olmo2", "opt", "persimmon", "phi3", "qwen2", "qwen3_moe", "qwen3_next",
    "roberta", "siglip", "starcoder2", "wav2vec2", "whisper", "xlm-roberta", "zamba2",
)  # fmt: skip


def on_meta(kind: str, **changes: object) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(kind, **changes))


def made(model: nn.Module) -> Small:
    small = small_copy(model)
    assert small is not None
    return small


def is_attention(name: str) -> bool:
    return any(word in name for word in ("q_proj", "k_proj", "v_proj", "query", "c_attn", "qkv"))


@pytest.mark.parametrize("kind", slow_unless(FAST, SAMPLE))
@pytest.mark.filterwarnings("ignore")
def test_every_parameter_has_a_stand_in_and_the_copy_runs(kind: str) -> None:
    model = on_meta(kind)
    state = torch.get_rng_state()
    small = made(model)
    assert torch.equal(state, torch.get_rng_state())
    sizes = {
        name: item.shape for name, item in small.model.named_parameters(remove_duplicate=False)
    }
    big = dict(model.named_parameters(remove_duplicate=False))
    assert set(small.names) == set(big)
    assert set(small.names.values()) == set(sizes)
    assert sum(item.numel() for item in small.model.parameters()) < LARGEST
    for name, item in big.items():
        stand = small.names[name]
        assert stand.rpartition(".")[2] == name.rpartition(".")[2]
        if is_attention(name):
            assert sizes[stand] == item.shape
    assert {item.device.type for item in small.model.parameters()} == {"cpu"}
    for call in candidate_inputs(small.model):
        try:
            with torch.no_grad():
                small.model(*call.args, **call.kwargs)
        except Exception:  # not this one
            continue
        return
    raise AssertionError("no guess ran")


def test_a_large_model_on_meta_becomes_one_of_well_below_two_gigabytes() -> None:
    small = made(on_meta("llama"))
    assert sum(4 * item.numel() for item in small.model.parameters()) < 1e9
    assert small.names["layers.31.self_attn.q_proj.weight"] == "layers.0.self_attn.q_proj.weight"


def test_layers_of_two_kinds_stand_for_their_own_kind() -> None:
    model = on_meta("jamba", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    small = made(model)
    for name, part in model.named_modules():
        if name.startswith("layers.") and name.count(".") == 1:
            parameter = f"{name}.{next(key for key, _ in part.named_parameters())}"
            stand = small.names[parameter]
            layer = small.model.get_submodule(".".join(stand.split(".")[:2]))
            assert type(layer) is type(part)
            assert type(layer.feed_forward) is type(part.feed_forward)


def test_the_config_of_the_original_stays() -> None:
    model = on_meta("gpt2")
    before = model.config.to_dict()
    made(model)
    assert model.config.to_dict() == before


def test_a_model_without_a_config_has_no_copy() -> None:
    assert small_copy(nn.Linear(2, 2)) is None


class Numbered(Mix):
    """An attention that may exchange query and key by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.exchanges():
            self.q, self.k = self.k, self.q
        mixed = super().forward(x)
        if self.exchanges():
            self.q, self.k = self.k, self.q
        return mixed

    def exchanges(self) -> bool:
        return False


class Exchanging(Numbered):
    def exchanges(self) -> bool:
        return self.number >= 3


class Counting(Numbered):
    """The number only scales, and chooses an entry of a cache."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.update(x, self.number)
        return super().forward(x) / float(self.number + 1)


class Fourth(Numbered):
    """Whether the number is divisible decides, also after an addition."""

    def exchanges(self) -> bool:
        return (self.number + 1) % 4 == 0


def in_turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def exchanged(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return k, q


class Plan:
    """A setting that is an object."""

    def __init__(self, exchanged: bool) -> None:
        self.exchanged = exchanged


class Set(Numbered):
    """Layer 4 exchanges query and key, and a setting of another kind says so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.set_to(number == 4)

    def set_to(self, exchanged: bool) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.turned(apart(self.q(x)), apart(self.k(x)))
        return self.o(attend(q, k, apart(self.v(x))))

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return exchanged(q, k) if self.exchanges() else (q, k)


class ByTuple(Set):
    def set_to(self, exchanged: bool) -> None:
        self.order = (1, 0) if exchanged else (0, 1)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k)[self.order[0]], (q, k)[self.order[1]]


class ByList(Set):
    def set_to(self, exchanged: bool) -> None:
        self.flags = [exchanged]

    def exchanges(self) -> bool:
        return self.flags[0]


class ByFunction(Set):
    def set_to(self, is_exchanged: bool) -> None:
        self.turned = exchanged if is_exchanged else in_turn  # type: ignore[method-assign]


class ByLambda(Set):
    def set_to(self, exchanged: bool) -> None:
        self.turned = lambda q, k: (k, q) if exchanged else (q, k)  # type: ignore[method-assign]


class ByFloat(Set):
    def set_to(self, exchanged: bool) -> None:
        self.sign = -1.0 if exchanged else 1.0

    def exchanges(self) -> bool:
        return self.sign < 0


class ByHiddenFlag(Set):
    def set_to(self, exchanged: bool) -> None:
        self._exchanged = exchanged

    def exchanges(self) -> bool:
        return self._exchanged


class ByObject(Set):
    def set_to(self, exchanged: bool) -> None:
        self.plan = Plan(exchanged)

    def exchanges(self) -> bool:
        return self.plan.exchanged


class ByBuffer(Set):
    flag: Tensor

    def set_to(self, exchanged: bool) -> None:
        self.register_buffer("flag", torch.tensor(float(exchanged)))

    def exchanges(self) -> bool:
        return bool(self.flag > 0)


class ByNothing(Set):
    """What differs between layers only scales, is used in training only, or is the same."""

    def set_to(self, exchanged: bool) -> None:
        self.size, self.functions = 1.0 / (self.number + 1), [in_turn, torch.relu]
        self.drop_rate = 0.1 * self.number
        self.register_buffer("scale", torch.tensor(1.0))

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.drop_rate > 0 and self.training:
            q = F.dropout(q, self.drop_rate)
        q *= self.scale
        return self.functions[0](q * self.size, k)


class Config(PretrainedConfig):
    model_type = "numbered"

    def __init__(self, num_hidden_layers: int = 6, **others: Any) -> None:
        super().__init__(**others)
        self.num_hidden_layers = num_hidden_layers


class OfNumbers(PreTrainedModel):
    config_class = Config
    kind: type[Numbered] = Exchanging

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(
            Block(self.kind(i)) for i in range(config.num_hidden_layers)
        )  # fmt: skip
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class OfCounts(OfNumbers):
    kind = Counting


def of_kind(chosen: type[Numbered]) -> nn.Module:
    """Return a model on `meta` whose layers have attentions of this class."""

    class Chosen(OfNumbers):
        kind = chosen

    with torch.device("meta"):
        return Chosen(Config())


def test_layers_that_differ_by_their_number_are_all_in_the_copy() -> None:
    with torch.device("meta"):
        model, other = OfNumbers(Config()), OfCounts(Config())
    assert len(made(model).model.layers) == 6  # type: ignore[arg-type]
    assert len(made(other).model.layers) == 2  # type: ignore[arg-type]
    for exchanging in (model, OfNumbers(Config())):
        with pytest.raises(fl.UnknownArchitecture, match=r"0.mix.q\S+ is query, but \S+3.mix.q"):
            fl.anatomy(exchanging)


@pytest.mark.parametrize(
    "kind",
    [Fourth, ByTuple, ByList, ByFunction, ByLambda, ByFloat, ByHiddenFlag, ByObject, ByBuffer],
)
def test_a_layer_that_a_setting_makes_different_is_in_the_copy(kind: type[Numbered]) -> None:
    model = of_kind(kind)
    with pytest.raises(fl.UnknownArchitecture, match=r"0.mix.q\S+ is query, but \S+[34].mix.q"):
        fl.anatomy(model)


def test_what_decides_nothing_does_not_enlarge_the_copy() -> None:
    model = of_kind(ByNothing)
    assert len(made(model).model.layers) == 2  # type: ignore[arg-type]
    assert fl.anatomy(model).evidence.copied


def test_evidence_of_a_copy_is_not_kept_for_a_model_with_values() -> None:
    with torch.device("meta"):
        model = OfCounts(Config())
    assert fl.anatomy(model).evidence.copied
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert not fl.anatomy(model).evidence.copied
    assert not fl.anatomy(OfCounts(Config()), None).evidence.copied
    assert not fl.anatomy(model, IDS).evidence.copied
