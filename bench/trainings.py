"""Small synthetic trainings of many kinds, by which advice is judged.

`training(batch, clip)` takes a step, and calls `clip(parameters)` where `clip_grad_norm_` would
stand. Weights come from torch's random state, and batches from a generator, so that the same seed
gives the same training, bit for bit on one machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot, softplus

from bench.models import Recurrent, dense

Clip = Callable[[Iterable[Tensor]], object]
Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]


class Training:
    """A model and its optimizer; it is judged on data that no step sees."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, task.model()
        self.optimizer = task.optimizer(self.model.parameters())
        self.held_out = task.draw(torch.Generator().manual_seed(7), task.held_out)

    def __call__(self, batch: Batch, clip: Clip) -> Tensor:
        """Takes a step, and returns the loss before it."""
        loss, score = self.loss_of(batch)
        self.optimizer.zero_grad()
        loss.backward()
        clip(self.model.parameters())
        self.optimizer.step()
        return score.detach()

    def loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss that a step reduces, and the loss that shows how training goes."""
        loss = self.task.loss(self.model, batch)
        return loss, loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on data that no step sees."""
        return float((self.task.judge or self.task.loss)(self.model, self.held_out))


class Task(NamedTuple):
    """A kind of training."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    loss: Loss
    draw: Callable[..., Batch]  # Takes a generator, a number of examples, and the noise.
    examples: int  # In a batch.
    steps: int
    held_out: int  # Examples that no step sees.
    noise: tuple[float, ...] = ()  # Of the batches; the held-out examples have none.
    judge: Loss | None = None  # The loss on held-out examples, if it differs from `loss`.
    training: Callable[[Task], Training] = Training

    def make(self) -> Training:
        """A new training with weights from torch's random state."""
        return self.training(self)

    def batches(self, seed: int) -> list[Batch]:
        """The batches of a seed, in order."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return [self.draw(generator, self.examples, *self.noise) for _ in range(self.steps)]


def sgd(lr: float, momentum: float = 0.9) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=lr, momentum=momentum)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, also over the elements of sequences."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def regress(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return mse_loss(model(inputs).squeeze(-1), targets)


def normal(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=generator)


def first_symbol(generator: torch.Generator, n: int) -> Batch:
    """Noisy sequences of 24 elements, of which only the first one shows the class."""
    classes = torch.randint(4, (n,), generator=generator)
    x = 0.5 * normal(generator, n, 24, 4)
    x[:, 0] = 2.0 * one_hot(classes, 4)
    return x, classes


def elman() -> nn.Module:
    """An Elman network with a long memory."""
    layer = nn.RNN(4, 32, batch_first=True)
    nn.init.orthogonal_(layer.get_parameter("weight_hh_l0"), gain=1.4)
    return Recurrent(layer, 32, 4, each=False)


def counted(generator: torch.Generator, n: int) -> Batch:
    """Texts of blocks such as aabbccd, with equal counts of a, b and c; and the next symbols."""
    rows = []
    for _ in range(n):
        row: list[int] = []
        while len(row) < 25:
            k = int(torch.randint(1, 6, (), generator=generator))
            row += [0] * k + [1] * k + [2] * k + [3]
        rows.append(row[:25])
    text = torch.tensor(rows)
    return one_hot(text[:, :-1], 4).float(), text[:, 1:]


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM(4, 24, batch_first=True), 24, 4, each=True)


class Transformer(nn.Module):
    """A causal transformer of two layers on symbols."""

    def __init__(self, symbols: int, length: int, width: int = 24) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, symbols)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each next symbol."""
        hidden = self.symbols(x) + self.positions
        return self.scores(self.layers(hidden, self.mask, is_causal=True))  # type: ignore[no-any-return]


def followed(generator: torch.Generator, n: int) -> Batch:
    """Texts of eight symbols; nine tenths of the symbols follow from the two before them."""
    text = torch.randint(8, (n, 17), generator=generator)
    is_free = torch.rand(n, 17, generator=generator) < 0.1
    for i in range(2, 17):
        rule = (text[:, i - 1] + 3 * text[:, i - 2]) % 8
        text[:, i] = torch.where(is_free[:, i], text[:, i], rule)
    return text[:, :-1], text[:, 1:]


def bars(generator: torch.Generator, n: int) -> Batch:
    """Noisy images of a bar in one of eight directions."""
    classes = torch.randint(8, (n,), generator=generator)
    shift = 2 * torch.rand(n, 1, 1, generator=generator) - 1
    angle = (classes * math.pi / 8).view(n, 1, 1)
    grid = torch.arange(10) - 4.5
    distance = grid.view(1, 10, 1) * angle.sin() - grid.view(1, 1, 10) * angle.cos() - 2 * shift
    images = (-distance.square()).exp() + 0.5 * normal(generator, n, 10, 10)
    return images.unsqueeze(1), classes


def convolution() -> nn.Module:
    first = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16 * 4, 8))


# The functions to be learned.
@cache
def hidden_network(inputs: int, outputs: int) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return dense(inputs, 32, outputs, between=nn.Tanh).requires_grad_(False)


@cache
def weights(n: int) -> Tensor:
    return normal(torch.Generator().manual_seed(5), n)


def cauchy_like(generator: torch.Generator, n: int, noise: float = 0.0) -> Batch:
    """A linear function of 20 inputs, plus Pareto noise of index 1.2 and of either sign."""
    x = normal(generator, n, 20)
    tail = torch.rand(n, generator=generator).pow(-1 / 1.2) - 1
    sign = torch.randint(2, (n,), generator=generator) * 2 - 1
    return x, x @ weights(20) + noise * sign * tail


def mislabelled(generator: torch.Generator, n: int, wrong: float = 0.0) -> Batch:
    """Examples of five classes, with some labels replaced by random ones."""
    x = normal(generator, n, 20)
    labels = hidden_network(20, 5)(3 * x).argmax(1)
    others = torch.randint(5, (n,), generator=generator)
    is_wrong = torch.rand(n, generator=generator) < wrong
    return x, torch.where(is_wrong, others, labels)


def smooth_function(generator: torch.Generator, n: int) -> Batch:
    x = normal(generator, n, 10)
    return x, hidden_network(10, 1)(2 * x).squeeze(1)


def corrupted(generator: torch.Generator, n: int, share: float = 0.0) -> Batch:
    """A regression without noise, in which a few batches are 30 times too large."""
    x, y = smooth_function(generator, n)
    factor = 30.0 if float(torch.rand((), generator=generator)) < share else 1.0
    return factor * x, factor * y


def counts(generator: torch.Generator, n: int) -> Batch:
    """Poisson counts; the logarithm of their mean is linear in 10 inputs with heavy tails."""
    x = normal(generator, n, 10) * (0.3 * normal(generator, n, 1)).exp()
    return x, torch.poisson((x @ weights(10) * 0.6).exp(), generator=generator)


def poisson_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The negative log likelihood of Poisson counts, whose gradient grows exponentially."""
    inputs, targets = batch
    scores: Tensor = model(inputs).squeeze(-1)
    return (scores.exp() - targets * scores).mean()


def in_logarithms(model: nn.Module, batch: Batch) -> Tensor:
    """The error of the logarithm of the mean."""
    inputs, _ = batch
    return mse_loss(model(inputs).squeeze(-1), inputs @ weights(10) * 0.6)


def deep() -> nn.Module:
    model = dense(10, *[32] * 16, 1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


class Factors(nn.Module):
    """Two matrices whose product is to match given elements."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(1.5 * torch.randn(40, 4))
        self.right = nn.Parameter(1.5 * torch.randn(40, 4))

    def forward(self, places: Tensor) -> Tensor:
        """The elements of the product at these places."""
        return (self.left[places[:, 0]] * self.right[places[:, 1]]).sum(1)


@cache
def low_rank() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return normal(generator, 40, 4) @ normal(generator, 4, 40)


def elements(generator: torch.Generator, n: int) -> Batch:
    places = torch.randint(40, (n, 2), generator=generator)
    return places, low_rank()[places[:, 0], places[:, 1]]


class PoleTraining(Training):
    """REINFORCE: policy gradients of episodes, with returns that are neither scaled nor centred."""

    def episodes(self, start: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions, and rewards, until the pole falls or the cart leaves."""
        state, alive = start, torch.ones(len(start))
        scores, rewards = [], []
        for draw in draws:
            log = self.model(state).log_softmax(1)
            action = (log[:, 1].detach().exp() > draw).long()
            scores.append(log.gather(1, action.unsqueeze(1)).squeeze(1) * alive)
            state = pole_after(state, action)
            alive = alive * (state[:, 2].abs() < 0.21) * (state[:, 0].abs() < 2.4)
            rewards.append(alive)
        return torch.stack(scores), torch.stack(rewards)

    def loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of policy gradients, and the negative mean length of the episodes."""
        scores, rewards = self.episodes(*batch)
        returns = rewards.flip(0).cumsum(0).flip(0)
        return -(scores * returns).sum(0).mean(), -rewards.sum(0).mean()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The negative mean length of other episodes."""
        length = float(self.episodes(*self.held_out)[1].sum(0).mean())
        # If weights are NaN, no action is chosen: the length means nothing.
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        return -length if finite else math.nan


def pole_after(state: Tensor, action: Tensor) -> Tensor:
    """Cart and pole after 0.02 s (Barto, Sutton and Anderson 1983)."""
    _, speed, angle, turn = state.unbind(1)
    force = 20.0 * action - 10.0
    sin, cos = angle.sin(), angle.cos()
    push = (force + 0.05 * turn.square() * sin) / 1.1
    bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    thrust = push - 0.05 * bend * cos / 1.1
    rates = torch.stack([speed, thrust, turn, bend], 1)
    return state + 0.02 * rates


def starts(generator: torch.Generator, n: int) -> Batch:
    """The first states of episodes, and a uniform number for each action."""
    start = 0.1 * torch.rand(n, 4, generator=generator) - 0.05
    return start, torch.rand(60, n, generator=generator)


class RingTraining(Training):
    """A generator against a discriminator, with two backward passes and two clips in each step.

    Their game does not converge, so the loss is a mean over the last batches, which are all new.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.optimizers = [task.optimizer(one.parameters()) for one in self.model.children()]
        self.last: deque[Tensor] = deque(maxlen=50)

    def __call__(self, batch: Batch, clip: Clip) -> Tensor:
        """Takes a step of both networks, and returns the distance on this batch before it."""
        real, noise = batch
        generator, judge = self.model.children()
        made = generator(noise)
        self.last.append(distance(made.detach(), real))

        self.model.zero_grad()
        (softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()).backward()
        clip(judge.parameters())
        self.optimizers[1].step()

        self.model.zero_grad()
        softplus(-judge(made)).mean().backward()
        clip(generator.parameters())
        self.optimizers[0].step()
        return self.last[-1]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean of the last distances; before any step, the distance on held-out points."""
        if self.last:
            return float(torch.stack([*self.last]).mean())
        real, noise = self.held_out
        return float(distance(next(self.model.children())(noise), real))


def game() -> nn.Module:
    return nn.ModuleList([dense(2, 64, 64, 2), dense(2, 64, 64, 1)])


def ring(generator: torch.Generator, n: int) -> Batch:
    """Points of eight clusters on a circle, and noise."""
    angle = torch.randint(8, (n,), generator=generator) * math.pi / 4
    real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * normal(generator, n, 2)
    return real, normal(generator, n, 2)


def distance(made: Tensor, real: Tensor) -> Tensor:
    """The energy distance of two samples (Szekely and Rizzo 2013)."""
    within = torch.cdist(made, made).mean() + torch.cdist(real, real).mean()
    return 2 * torch.cdist(made, real).mean() - within


def clean_line(generator: torch.Generator, n: int) -> Batch:
    x = normal(generator, n, 20)
    return x, x @ weights(20)


# The rest belongs to trainings that nobody had seen when the search was last changed.


def sparse(generator: torch.Generator, n: int) -> Batch:
    """Signals of 24 elements, each mixed from three of 12 waves."""
    waves = (torch.arange(1, 13).view(12, 1) * torch.arange(24) * math.pi / 24).sin()
    chosen = torch.rand(n, 12, generator=generator).argsort(1) < 3
    signals = (chosen * normal(generator, n, 12)) @ waves
    return signals, signals


def reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def views(generator: torch.Generator, n: int) -> Batch:
    """Two noisy views of each of n points."""
    points = normal(generator, n, 6) @ weights(6 * 16).view(6, 16)
    return tuple(points + 0.5 * normal(generator, n, 16) for _ in range(2))


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    """InfoNCE: find the second view of each first view (van den Oord et al. 2018)."""
    first, second = (nn.functional.normalize(model(one), dim=1) for one in batch)
    return cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))


def marked_sums(generator: torch.Generator, n: int) -> Batch:
    """The adding problem: numbers, two of which are marked, and the sum of these two."""
    numbers = torch.rand(n, 20, generator=generator)
    marks = (torch.rand(n, 20, generator=generator).argsort(1) < 2).float()
    return torch.stack([numbers, marks], 2), (numbers * marks).sum(1)


def gru() -> nn.Module:
    return Recurrent(nn.GRU(2, 24, batch_first=True), 24, 1, each=False)


@cache
def chain() -> tuple[Tensor, Tensor]:
    """Probabilities of a Markov chain of 16 states, and the value of each."""
    generator = torch.Generator().manual_seed(5)
    moves = (2 * normal(generator, 16, 16)).softmax(1)
    rewards = normal(generator, 16, 1)
    return moves, torch.linalg.solve(torch.eye(16) - 0.9 * moves, rewards).squeeze(1)


def transitions(generator: torch.Generator, n: int) -> Batch:
    moves, values = chain()
    before = torch.randint(16, (n,), generator=generator)
    after = torch.multinomial(moves[before], 1, generator=generator).squeeze(1)
    rewards = values - 0.9 * moves @ values
    return one_hot(before, 16).float(), one_hot(after, 16).float(), rewards[before], values[before]


def bootstrap(model: nn.Module, batch: Batch) -> Tensor:
    """The error of temporal differences; the model itself gives the target."""
    before, after, rewards, _ = batch
    target = rewards + 0.9 * model(after).squeeze(1).detach()
    return mse_loss(model(before).squeeze(1), target)


def true_values(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0]).squeeze(1), batch[3])


def branches(generator: torch.Generator, n: int) -> Batch:
    """Values of one of two functions, plus noise that is small for negative numbers."""
    x = 4 * torch.rand(n, 1, generator=generator) - 2
    sign = torch.randint(2, (n, 1), generator=generator) * 2 - 1
    noise = (0.02 + 0.2 * (x > 0)) * normal(generator, n, 1)
    return x, (sign * (1 + x.sin()) + noise).squeeze(1)


def mixture(model: nn.Module, batch: Batch) -> Tensor:
    """The negative log likelihood of a mixture of four normal distributions (Bishop 1994)."""
    shares, means, scales = model(batch[0]).chunk(3, 1)
    distance = (batch[1].unsqueeze(1) - means) * (-scales).exp()
    likelihood: Tensor = (shares.log_softmax(1) - distance.square() / 2 - scales).logsumexp(1)
    return -likelihood.mean()


class Experts(nn.Module):
    """A mixture of eight experts; each input uses the two that the gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(20, 8)
        self.first = nn.Parameter(torch.randn(8, 20, 16) / 20**0.5)
        self.last = nn.Parameter(torch.randn(8, 16, 5) / 16**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        gates = self.gate(x)
        kept = gates.where(gates >= gates.topk(2).values[:, 1:], -math.inf).softmax(1)
        hidden = torch.einsum("ni,eih->neh", x, self.first).relu()
        return torch.einsum("neh,eho,ne->no", hidden, self.last, kept)


def rare_words(generator: torch.Generator, n: int) -> Batch:
    """Counts of 60 words, most of them rare, and a class that depends on which words occur."""
    rates = 8.0 / torch.arange(1, 61)
    counts = torch.poisson(rates.expand(n, 60), generator=generator)
    scores = (counts > 0).float() @ weights(60 * 3).view(60, 3)
    return counts, (scores + 0.3 * normal(generator, n, 3)).argmax(1)


class Largest(nn.Module):
    """Attention of one query over a set of points."""

    def __init__(self) -> None:
        super().__init__()
        self.each = dense(2, 24, 24)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.query, self.last = nn.Parameter(torch.randn(1, 1, 24)), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each set."""
        keys = self.each(x)
        pooled, _ = self.attention(self.query.expand(len(x), 1, 24), keys, keys)
        return self.last(pooled.squeeze(1))  # type: ignore[no-any-return]


def sets(generator: torch.Generator, n: int) -> Batch:
    """Sets of eight points, and the largest distance of a point from the origin."""
    points = normal(generator, n, 8, 2)
    return points, points.norm(dim=2).max(1).values


def spikes(generator: torch.Generator, n: int, share: float = 0.0) -> Batch:
    """Series and their next values; in some batches one series is that of a failing sensor."""
    start = 6 * torch.rand(n, 1, generator=generator)
    series = (start + 0.5 * torch.arange(13)).sin() + 0.1 * normal(generator, n, 13)
    if float(torch.rand((), generator=generator)) < share:
        series[0] = 200.0
    return series[:, :-1], series[:, -1]


class Code(nn.Module):
    """A variational autoencoder of two numbers (Kingma and Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(24, 32, 4), dense(2, 32, 24)

    def forward(self, x: Tensor) -> Tensor:
        """The negative evidence bound of each example; the likelihood has the deviation 0.2."""
        means, scales = self.encoder(x).chunk(2, 1)
        made = self.decoder(means + scales.exp() * torch.randn_like(means))
        prior = (means.square() + (2 * scales).exp()).sum(1) / 2 - scales.sum(1)
        error = (x - made).square().sum(1) / (2 * 0.2**2)
        return error + prior  # type: ignore[no-any-return]


def bound(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch[0]).mean()
    return found


LINE, CLASSIFIER = partial(nn.Linear, 20, 1), partial(dense, 20, 64, 64, 5)
SMOOTH, POLICY = (partial(dense, *own, between=nn.Tanh) for own in ((10, 64, 64, 1), (4, 32, 2)))
COUNTS, ADAMW = partial(nn.Linear, 10, 1), partial(torch.optim.AdamW, lr=3e-3)
# Fields in order: model, optimizer, loss, draw, examples, steps, held-out examples, noise.
TASKS = {
    "Elman network, long memory": Task(elman, sgd(0.03), classify, first_symbol, 16, 200, 512),
    # The learning rate is that of language models of its time.
    "LSTM, counting": Task(lstm, sgd(12.0, 0.0), classify, counted, 8, 200, 128),
    # Learning rates at which gradients spike, and networks may diverge.
    "transformer": Task(lambda: Transformer(8, 16), sgd(0.5), classify, followed, 16, 200, 128),
    "convolution": Task(convolution, sgd(0.3), classify, bars, 32, 200, 512),
    "deep network": Task(deep, sgd(0.1), regress, smooth_function, 32, 250, 512),
    # Noise without a variance.
    "regression, heavy tails": Task(LINE, sgd(0.02), regress, cauchy_like, 32, 400, 512, (1.0,)),
    "regression of counts": Task(
        COUNTS, sgd(0.003), poisson_loss, counts, 32, 400, 512, judge=in_logarithms
    ),
    # Gradients grow with the error.
    "matrix factors": Task(Factors, sgd(0.7), regress, elements, 64, 400, 1024),
    "corrupt batches": Task(SMOOTH, sgd(0.05), regress, corrupted, 32, 400, 512, (0.03,)),
    "wrong labels": Task(CLASSIFIER, sgd(0.3), classify, mislabelled, 32, 400, 1024, (0.4,)),
    "policy gradient": Task(POLICY, sgd(0.01), classify, starts, 8, 50, 64, training=PoleTraining),
    "GAN": Task(game, sgd(0.1, 0.5), classify, ring, 64, 250, 512, training=RingTraining),
    # Nothing to gain.
    "clean labels, AdamW": Task(CLASSIFIER, ADAMW, classify, mislabelled, 32, 400, 1024),
    "clean regression": Task(LINE, sgd(0.01), regress, clean_line, 32, 400, 512),
}
RMSPROP = partial(torch.optim.RMSprop, lr=0.01)
# Each was trained for the first time after the last change to the search.
NEW = {
    "autoencoder": Task(
        partial(dense, 24, 32, 6, 32, 24), sgd(0.3), reconstruct, sparse, 32, 300, 512
    ),
    "contrastive pairs": Task(partial(dense, 16, 32, 8), sgd(0.3), contrast, views, 32, 250, 256),
    "GRU, adding": Task(gru, sgd(0.3), regress, marked_sums, 32, 250, 512),
    "temporal differences": Task(
        partial(dense, 16, 32, 1), sgd(0.1), bootstrap, transitions, 16, 300, 512, judge=true_values
    ),
    "mixture density": Task(partial(dense, 1, 32, 12), sgd(0.02), mixture, branches, 32, 300, 1024),
    "mixture of experts": Task(Experts, sgd(1.0), classify, mislabelled, 32, 300, 1024, (0.1,)),
    "rare words, RMSprop": Task(
        partial(nn.Linear, 60, 3), RMSPROP, classify, rare_words, 16, 300, 1024
    ),
    "attention over sets, AdamW": Task(
        Largest, partial(torch.optim.AdamW, lr=0.02), regress, sets, 32, 250, 512
    ),
    "failing sensor, Adam": Task(
        partial(dense, 12, 32, 1),
        partial(torch.optim.Adam, lr=3e-3),
        regress,
        spikes,
        16,
        300,
        1024,
        (0.05,),
    ),
    "variational autoencoder": Task(Code, sgd(0.003), bound, sparse, 32, 300, 512),
}
TASKS |= NEW
