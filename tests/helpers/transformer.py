"""A small transformer, and how it is spread over processes."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

N_TOKENS, LENGTH, WIDTH, HEADS = 32, 8, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wv, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as lie here.
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(silu(self.w1(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """One layer; the same weights in every process."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(N_TOKENS, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, N_TOKENS)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


def tokens(step: int, n: int = 8) -> Tensor:
    """A batch, the same in every process; each next token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(N_TOKENS, (n, 1), generator=generator)
    return (first + 5 * torch.arange(LENGTH + 1)) % N_TOKENS


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def parallelize(model: Transformer, mesh: DeviceMesh, *, sequence: bool) -> Transformer:
    """Tensor parallelism, with the norms on pieces of the sequence or on all of it."""
    split = ColwiseParallel()
    joined = RowwiseParallel(output_layouts=Shard(1) if sequence else None)
    plan: dict[str, ParallelStyle] = dict.fromkeys(
        ("attention.wq", "attention.wk", "attention.wv"), split
    )
    plan |= {"attention.wo": joined, "feed_forward.w1": split, "feed_forward.w2": joined}
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel())
        plan |= dict.fromkeys(("attention", "feed_forward"), gather)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if not sequence:
        return model
    ends = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    return model


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """FSDP2, a unit a layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
