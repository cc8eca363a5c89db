"""Deep supervision: every layer predicts the next token through one wide head."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.bench.ceilings import step_work
from frostlab.bench.checking import agree, step_losses
from frostlab.bench.classifying import PRETRAINING
from frostlab.bench.made import drawn_feed
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, looped
from frostlab.bench.setting import Setting
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.training.batching import Batch
from frostlab.training.losses import head_loss

Loss = Callable[[list[Tensor], Tensor, Tensor], Tensor]


def fused(hidden: list[Tensor], weight: Tensor, targets: Tensor) -> Tensor:
    """Every layer's summed loss without logits."""
    return head_loss(hidden, weight, targets)[0]


def plain(hidden: list[Tensor], weight: Tensor, targets: Tensor) -> Tensor:
    """Every layer's logits, then cross-entropy in float32."""
    losses = [
        F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum") for x in hidden
    ]
    return torch.stack(losses).sum()


class Headless(nn.Module):
    """A decoder that answers with what comes out of each block, (B·T, width), and no logits."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.weight, self.found = model.head.weight, list[Tensor]()
        model.head = nn.Identity()  # type: ignore[assignment]
        self.model = model
        for block in model.blocks:
            block.register_forward_hook(lambda _, given, out: self.found.append(out))

    def forward(self, ids: Tensor) -> list[Tensor]:
        self.found.clear()
        self.model(ids)
        hidden = [self.model.norm(x).flatten(0, 1) for x in self.found]
        self.found.clear()
        return hidden


class Supervised:
    """One step over one resident batch, replayed as a CUDA graph where that works."""

    def __init__(self, loss: Loss, batch: Batch, setting: Setting) -> None:
        torch.manual_seed(0)
        self.loss, self.setting = loss, setting
        self.batch = batch.to(setting.device)
        self.model = Headless(Decoder(decoder_config(setting))).to(setting.device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=PRETRAINING.lr, fused=True, capturable=setting.cuda
        )
        self.kind, self.reason = "eager", "the CPU has no graphs"
        self.out = torch.zeros((), device=setting.device)

    def step(self) -> Tensor:
        """Forward, backward, update."""
        device, bf16 = self.setting.device.type, self.setting.precision == torch.bfloat16
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            hidden = self.model(self.batch.inputs["input_ids"])
            total = self.loss(hidden, self.model.weight, self.batch.targets.flatten())
        loss = total / (self.batch.scored * len(hidden))
        loss.backward()
        self.optimizer.step()
        self.out.copy_(loss.detach())
        return self.out

    def captured(self) -> Step:
        """The step as one graph; eager, with the reason kept, where it cannot be captured."""
        if not self.setting.cuda:
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as error:
            self.reason = f"not captured: {str(error).partition(chr(10))[0]}"
            return self.step
        self.kind, self.reason = "captured", "one CUDA graph"
        return graph.replay


def decoder_config(setting: Setting) -> DecoderConfig:
    """The progressive-training model; small: V 400."""
    return DecoderConfig(vocabulary=400, width=16) if setting.small else DecoderConfig()


def deep_supervision(setting: Setting) -> Iterator[Result]:
    """The fused loss against plain logits, all else the same."""
    batch, length = (4, 8) if setting.small else (64, 32)
    config = decoder_config(setting)
    first = drawn_feed(batch, length + 1, config.vocabulary, 0)(0)
    mine, other = (step_losses(Supervised(loss, first, setting).step) for loss in (fused, plain))
    check = agree(mine, other, setting.precision)
    kept: list[Supervised] = []

    def built(loss: Loss) -> Step:
        kept.append(Supervised(loss, first, setting))
        return kept[-1].captured()

    def theirs() -> Driver:
        return looped(built(plain))

    times = setting.interleave(lambda: built(fused), theirs, rounds=40)
    work = step_work(Decoder(config), length, batch * length)
    # the head works once more for each layer but the last, which is counted: forward, backward
    head = 6 * config.vocabulary * config.width * (config.layers - 1) * batch * length
    work = type(work)(work.flops + head, work.parameters)
    yield result_of(
        setting,
        times,
        work,
        batch * length,
        case=f"{config.layers} layers, {batch} × {length}",
        check=check,
        step=(kept[0].kind, kept[0].reason),
        notes=(f"theirs: plain logits, {kept[1].kind}: {kept[1].reason}",),
    )
