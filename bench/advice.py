"""Trainings by which advice is judged: small, synthetic, and of many kinds.

Each is a `make` function, as `tritonclip.find_max_norm` takes it: it gives a step function
`step(batch, clip)`, which calls `clip(parameters)` where `clip_grad_norm_` would stand. Weights
come from torch's random state, and batches from a generator: the same seed is the same training,
bit for bit on one machine. Every way to clip goes through this one door.

`suggest` reads the recorded run without clipping of the same seed. `find` gets batches and seeds
that no other training has, and its answer holds for all seeds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot, softplus

import tritonclip
from tritonclip.rules import Rule

Clip = Callable[[Iterable[Tensor]], object]
Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]


class Training:
    """A model and its optimizer: a step function, judged on data that no step sees.

    Args:
        model: that is trained.
        optimizer: of its parameters.
        loss_of: the loss of a batch.
        held_out: a batch that no step sees.
        judge: its loss, where this is another one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Loss,
        held_out: Batch,
        judge: Loss | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss_of = model, optimizer, loss_of
        self._held_out, self._judge = held_out, judge or loss_of

    def __call__(self, batch: Batch, clip: Clip) -> Tensor:
        """Takes a step, and returns the loss before it."""
        loss = self.loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        clip(self.model.parameters())
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on data that no step sees."""
        return float(self._judge(self.model, self._held_out))


class Task(NamedTuple):
    """A kind of training.

    Attributes:
        make: a new training, from torch's random state.
        draw: the batch of a generator.
        steps: the number of batches.
    """

    make: Callable[[], Training]
    draw: Callable[[torch.Generator], Batch]
    steps: int

    def batches(self, seed: int) -> list[Batch]:
        """The batches of a seed, in order."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return [self.draw(generator) for _ in range(self.steps)]


def sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr, momentum)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, also of each element of a sequence."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def regress(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    inputs, targets = batch
    return mse_loss(model(inputs).squeeze(-1), targets)


def fixed(draw: Callable[[torch.Generator], Batch]) -> Batch:
    """The held-out data of a task."""
    return draw(torch.Generator().manual_seed(7))


def dense(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with a nonlinearity between them."""
    layers = [one for i, o in pairwise(widths) for one in (nn.Linear(i, o), between())]
    return nn.Sequential(*layers[:-1])


def normal(generator: torch.Generator, *sizes: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(sizes, generator=generator)


# Recurrent.


class Recurrent(nn.Module):
    """A recurrent layer, and scores from its last state, or from each of its states."""

    def __init__(self, layer: nn.Module, width: int, outputs: int, *, each: bool) -> None:
        super().__init__()
        self.layer, self.scores, self.each = layer, nn.Linear(width, outputs), each

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a sequence, or of each of its elements."""
        states = self.layer(x)[0]
        return self.scores(states if self.each else states[:, -1])  # type: ignore[no-any-return]


def first_symbol(generator: torch.Generator, n: int = 16) -> Batch:
    """Sequences of noise, in which only the first of 24 elements tells the class."""
    classes = torch.randint(4, (n,), generator=generator)
    x = 0.5 * normal(generator, n, 24, 4)
    x[:, 0] = 2.0 * one_hot(classes, 4)
    return x, classes


def elman() -> Training:
    """An Elman network with a long memory."""
    layer = nn.RNN(4, 32, batch_first=True)
    nn.init.orthogonal_(layer.get_parameter("weight_hh_l0"), gain=1.4)
    model = Recurrent(layer, 32, 4, each=False)
    return Training(model, sgd(model, 0.03), classify, fixed(partial(first_symbol, n=512)))


def counted(generator: torch.Generator, n: int = 8) -> Batch:
    """Texts of blocks such as aabbccd, with as many of a, b and c; one-hot, and what follows."""
    rows = []
    for _ in range(n):
        row: list[int] = []
        while len(row) < 25:
            k = int(torch.randint(1, 6, (), generator=generator))
            row += [0] * k + [1] * k + [2] * k + [3]
        rows.append(row[:25])
    text = torch.tensor(rows)
    return one_hot(text[:, :-1], 4).float(), text[:, 1:]


def lstm() -> Training:
    """An LSTM that counts letters, at the learning rate of language models of its time."""
    model = Recurrent(nn.LSTM(4, 24, batch_first=True), 24, 4, each=True)
    return Training(model, sgd(model, 12.0, 0.0), classify, fixed(partial(counted, n=128)))


# Attention, convolution.


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


def followed(generator: torch.Generator, n: int = 16) -> Batch:
    """Texts of eight symbols, each of which follows from the two before it, but for a tenth."""
    text = torch.randint(8, (n, 17), generator=generator)
    is_free = torch.rand(n, 17, generator=generator) < 0.1
    for i in range(2, 17):
        rule = (text[:, i - 1] + 3 * text[:, i - 2]) % 8
        text[:, i] = torch.where(is_free[:, i], text[:, i], rule)
    return text[:, :-1], text[:, 1:]


def transformer() -> Training:
    """A transformer, at a learning rate at which its gradients spike."""
    model = Transformer(8, 16)
    return Training(model, sgd(model, 0.5), classify, fixed(partial(followed, n=128)))


def bars(generator: torch.Generator, n: int = 32) -> Batch:
    """Images of a bar in one of eight directions, under noise."""
    classes = torch.randint(8, (n,), generator=generator)
    shift = 2 * torch.rand(n, 1, 1, generator=generator) - 1
    angle = (classes * math.pi / 8).view(n, 1, 1)
    grid = torch.arange(10) - 4.5
    distance = grid.view(1, 10, 1) * angle.sin() - grid.view(1, 1, 10) * angle.cos() - 2 * shift
    images = (-distance.square()).exp() + 0.5 * normal(generator, n, 10, 10)
    return images.unsqueeze(1), classes


def convolution() -> Training:
    """A convolutional network without normalization, at a high learning rate."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 4, 8)),
    )
    return Training(model, sgd(model, 0.3), classify, fixed(partial(bars, n=512)))


# Noise.


@cache
def hidden_network(inputs: int, outputs: int) -> nn.Sequential:
    """The function that is to be learned."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return dense(inputs, 32, outputs, between=nn.Tanh).requires_grad_(False)


@cache
def weights(n: int) -> Tensor:
    """Of a linear function that is to be learned."""
    return normal(torch.Generator().manual_seed(5), n)


def cauchy_like(generator: torch.Generator, n: int = 32, noise: float = 1.0) -> Batch:
    """A linear function of 20 inputs, under Pareto's noise of index 1.2 and of either sign."""
    x = normal(generator, n, 20)
    tail = torch.rand(n, generator=generator).pow(-1 / 1.2) - 1
    sign = torch.randint(2, (n,), generator=generator) * 2 - 1
    return x, x @ weights(20) + noise * sign * tail


def heavy_tails() -> Training:
    """A linear regression under noise without a variance."""
    model = nn.Linear(20, 1)
    return Training(model, sgd(model, 0.02), regress, fixed(partial(cauchy_like, n=512, noise=0.0)))


def mislabelled(generator: torch.Generator, n: int = 32, wrong: float = 0.4) -> Batch:
    """Five classes, some of whose labels are replaced by random ones."""
    x = normal(generator, n, 20)
    labels = hidden_network(20, 5)(3 * x).argmax(1)
    others = torch.randint(5, (n,), generator=generator)
    is_wrong = torch.rand(n, generator=generator) < wrong
    return x, torch.where(is_wrong, others, labels)


def label_noise() -> Training:
    """A network of three layers on wrong labels."""
    model = dense(20, 64, 64, 5)
    return Training(
        model, sgd(model, 0.3), classify, fixed(partial(mislabelled, n=1024, wrong=0.0))
    )


def corrupted(generator: torch.Generator, n: int = 32, share: float = 0.03) -> Batch:
    """A clean regression, in which a few batches are 30 times too large."""
    x = normal(generator, n, 10)
    y = hidden_network(10, 1)(2 * x).squeeze(1)
    factor = 30.0 if float(torch.rand((), generator=generator)) < share else 1.0
    return factor * x, factor * y


def corrupt_batches() -> Training:
    """A network that meets corrupt batches."""
    model = dense(10, 64, 64, 1, between=nn.Tanh)
    return Training(model, sgd(model, 0.05), regress, fixed(partial(corrupted, n=512, share=0.0)))


def counts(generator: torch.Generator, n: int = 32) -> Batch:
    """Counts whose logarithm is linear in 10 inputs with tails."""
    x = normal(generator, n, 10) * (0.3 * normal(generator, n, 1)).exp()
    return x, torch.poisson((x @ weights(10) * 0.6).exp(), generator=generator)


def poisson_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Poisson's negative log likelihood, whose gradient grows with the exponential."""
    inputs, targets = batch
    scores: Tensor = model(inputs).squeeze(-1)
    return (scores.exp() - targets * scores).mean()


def in_logarithms(model: nn.Module, batch: Batch) -> Tensor:
    """The error of the logarithm of the mean."""
    inputs, _ = batch
    return mse_loss(model(inputs).squeeze(-1), inputs @ weights(10) * 0.6)


def poisson() -> Training:
    """A regression of counts with an exponential link."""
    model = nn.Linear(10, 1)
    held_out = fixed(partial(counts, n=512))
    return Training(model, sgd(model, 0.003), poisson_loss, held_out, in_logarithms)


# Deep, or not convex.


def smooth_function(generator: torch.Generator, n: int = 32) -> Batch:
    """A smooth function of ten inputs."""
    x = normal(generator, n, 10)
    return x, hidden_network(10, 1)(2 * x).squeeze(1)


def deep() -> Training:
    """Sixteen layers without normalization, at a learning rate at which they may diverge."""
    model = dense(10, *[32] * 16, 1, between=nn.ReLU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return Training(model, sgd(model, 0.1), regress, fixed(partial(smooth_function, n=512)))


class Factors(nn.Module):
    """The product of two matrices, and its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(1.5 * torch.randn(40, 4))
        self.right = nn.Parameter(1.5 * torch.randn(40, 4))

    def forward(self, places: Tensor) -> Tensor:
        """Elements at these places."""
        return (self.left[places[:, 0]] * self.right[places[:, 1]]).sum(1)


@cache
def low_rank() -> Tensor:
    """The matrix that is to be found."""
    generator = torch.Generator().manual_seed(5)
    return normal(generator, 40, 4) @ normal(generator, 4, 40)


def elements(generator: torch.Generator, n: int = 64) -> Batch:
    """Elements of the matrix."""
    places = torch.randint(40, (n, 2), generator=generator)
    return places, low_rank()[places[:, 0], places[:, 1]]


def factorization() -> Training:
    """Two factors of a matrix, whose gradients grow with the error."""
    model = Factors()
    return Training(model, sgd(model, 0.7), regress, fixed(partial(elements, n=1024)))


# Two losses that are not of a fixed set of data.


class PoleTraining(Training):
    """REINFORCE: policy gradients of episodes, with returns that are neither scaled nor centred."""

    def episodes(self, start: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the actions, and rewards; an episode ends when the pole falls."""
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

    def __call__(self, batch: Batch, clip: Clip) -> Tensor:
        """A step on a batch of episodes; the loss is the negative mean length."""
        scores, rewards = self.episodes(*batch)
        returns = rewards.flip(0).cumsum(0).flip(0)
        self.optimizer.zero_grad()
        (-(scores * returns).sum(0).mean()).backward()
        clip(self.model.parameters())
        self.optimizer.step()
        return -rewards.sum(0).mean()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The negative mean length of other episodes."""
        length = float(self.episodes(*self._held_out)[1].sum(0).mean())
        # Of weights that are NaN no action is chosen.
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


def starts(generator: torch.Generator, n: int = 8) -> Batch:
    """First states of episodes, and a uniform number for each action."""
    start = 0.1 * torch.rand(n, 4, generator=generator) - 0.05
    return start, torch.rand(60, n, generator=generator)


def policy_gradient() -> Training:
    """A policy that balances a pole."""
    model = dense(4, 32, 2, between=nn.Tanh)
    held_out = fixed(partial(starts, n=64))
    return PoleTraining(model, sgd(model, 0.01), classify, held_out)


class RingTraining(Training):
    """A generator against a discriminator: two backward passes and two clips in a step.

    Their game has no end: the loss is a mean over the last batches, of which each is new.
    """

    def __init__(self) -> None:
        model = nn.ModuleList([dense(2, 64, 64, 2), dense(2, 64, 64, 1)])
        self.optimizers = [sgd(one, 0.1, 0.5) for one in model]
        self.last: deque[Tensor] = deque(maxlen=50)
        super().__init__(model, self.optimizers[0], classify, fixed(partial(ring, n=512)))

    def __call__(self, batch: Batch, clip: Clip) -> Tensor:
        """A step of each; the loss is the distance of this batch."""
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
        """The mean distance of the last batches before their steps, or of other points at first."""
        if self.last:
            return float(torch.stack([*self.last]).mean())
        real, noise = self._held_out
        return float(distance(next(self.model.children())(noise), real))


def ring(generator: torch.Generator, n: int = 64) -> Batch:
    """Points of eight clusters on a circle, and noise."""
    angle = torch.randint(8, (n,), generator=generator) * math.pi / 4
    real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * normal(generator, n, 2)
    return real, normal(generator, n, 2)


def distance(made: Tensor, real: Tensor) -> Tensor:
    """The energy distance of two samples (Szekely and Rizzo 2013)."""
    within = torch.cdist(made, made).mean() + torch.cdist(real, real).mean()
    return 2 * torch.cdist(made, real).mean() - within


# Nothing to gain.


def clean_line(generator: torch.Generator, n: int = 32) -> Batch:
    """A linear function without noise."""
    x = normal(generator, n, 20)
    return x, x @ weights(20)


def convex() -> Training:
    """A linear regression on clean data, at a good learning rate."""
    model = nn.Linear(20, 1)
    return Training(model, sgd(model, 0.01), regress, fixed(partial(clean_line, n=512)))


def clean() -> Training:
    """A network of three layers under AdamW on clean labels."""
    model = dense(20, 64, 64, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return Training(model, optimizer, classify, fixed(partial(mislabelled, n=1024, wrong=0.0)))


TASKS: dict[str, Task] = {
    "Elman network, long memory": Task(elman, first_symbol, 200),
    "LSTM, counting": Task(lstm, counted, 200),
    "transformer": Task(transformer, followed, 200),
    "convolution": Task(convolution, bars, 200),
    "deep network": Task(deep, smooth_function, 250),
    "regression, heavy tails": Task(heavy_tails, cauchy_like, 400),
    "regression of counts": Task(poisson, counts, 400),
    "matrix factors": Task(factorization, elements, 400),
    "corrupt batches": Task(corrupt_batches, corrupted, 400),
    "wrong labels": Task(label_noise, mislabelled, 400),
    "policy gradient": Task(policy_gradient, starts, 50),
    "GAN": Task(RingTraining, ring, 250),
    "clean labels, AdamW": Task(clean, partial(mislabelled, wrong=0.0), 400),
    "clean regression": Task(convex, clean_line, 400),
}


class Run(NamedTuple):
    """How a training went.

    Attributes:
        loss: at its end, on held-out data.
        losses: of its steps.
        norms: of its steps before clipping, one after the other where a step clips twice.
    """

    loss: float
    losses: list[float]
    norms: list[float]


def train(task: Task, seed: int, clip: float | Rule) -> Run:
    """Trains once, with a limit or a rule."""
    states: dict[int, tritonclip.ClipState] = {}
    norms: list[Tensor] = []

    def clip_(parameters: Iterable[Tensor]) -> Tensor:
        listed = list(parameters)
        # A state for each list of parameters.
        state = states.setdefault(id(listed[0]), tritonclip.ClipState())
        norm = tritonclip.clip_(listed, clip, state=state)
        norms.append(norm if norm.dim() == 0 else norm.norm())
        return norm

    torch.manual_seed(seed)
    step = task.make()
    losses = [float(step(batch, clip_)) for batch in task.batches(seed)]
    return Run(step.held_out_loss(), losses, [float(norm) for norm in norms])


GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RULES: dict[str, Rule] = {
    "ClipByQuantile()": tritonclip.ClipByQuantile(),
    "ClipByZScore()": tritonclip.ClipByZScore(),
    "ClipByUnitNorm()": tritonclip.ClipByUnitNorm(),
}
SUGGESTED = {"suggest": True, "suggest without losses": False}
ADVICE = ("no clipping", "best of the grid", "1.0", *SUGGESTED, "find", *RULES)
# Of the trainings that `find` tries, on none of which anything is judged.
SEEDS_OF_FIND = (10, 11, 12)
STEPS_OF_FIND = 200


class Outcome(NamedTuple):
    """What came of advice.

    Attributes:
        loss: at the end of training.
        limit: that was advised; None for none, and for a rule.
        seconds: that training took.
        names_find: whether `find_max_norm` was named.
    """

    loss: float
    limit: float | None
    seconds: float
    names_find: bool = False


def suggested(run: Run, folder: Path, *, with_losses: bool) -> tuple[float | None, bool]:
    """The limit for a recorded run without clipping, and whether `find_max_norm` is named."""
    path = folder / "run.csv"
    path.unlink(missing_ok=True)
    with tritonclip.record(path) as recorder:
        for i, norm in enumerate(run.norms):
            loss = run.losses[i * len(run.losses) // len(run.norms)]
            recorder.add_(norm, limit=math.inf, loss=loss if with_losses else None)
    try:
        found = tritonclip.suggest_max_norm(path)
    except ValueError as error:
        # Too few norms before the first NaN.
        return None, "find_max_norm" in str(error)
    return found.max_norm, "find_max_norm" in found.reason


def found(task: Task) -> float | None:
    """The limit that `find_max_norm` finds in trainings that are not judged."""
    steps = min(STEPS_OF_FIND, task.steps)
    search = tritonclip.find_max_norm(
        task.make,
        task.batches(SEEDS_OF_FIND[0]),
        steps=steps,
        seeds=SEEDS_OF_FIND,
        progress=lambda done, most: None,
    )
    return search.max_norm


class Outcomes:
    """The outcomes of all advice for a task, by seed, each trained when it is first asked for."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task, self._folder = task, folder
        self._trained: dict[tuple[int, float | Rule], tuple[Run, float]] = {}
        self._found: list[float | None] = []

    def of(self, advice: str, seed: int) -> Outcome:
        """The outcome of advice for a seed."""
        limit: float | None = None
        names_find = False
        if advice in RULES:
            return self._outcome(seed, RULES[advice])
        if advice == "best of the grid":
            return min(map(partial(self._outcome, seed), (math.inf, *GRID)), key=_key)
        if advice == "1.0":
            limit = 1.0
        elif advice in SUGGESTED:
            run, _ = self._train(seed, math.inf)
            limit, names_find = suggested(run, self._folder, with_losses=SUGGESTED[advice])
        elif advice == "find":
            self._found = self._found or [found(self._task)]
            (limit,) = self._found
        outcome = self._outcome(seed, math.inf if limit is None else limit)
        return outcome._replace(names_find=names_find)

    def untrained(self, seed: int) -> float:
        """The loss before the first step."""
        torch.manual_seed(seed)
        return self._task.make().held_out_loss()

    def _outcome(self, seed: int, clip: float | Rule) -> Outcome:
        run, seconds = self._train(seed, clip)
        limit = None if isinstance(clip, Rule) or math.isinf(clip) else clip
        return Outcome(run.loss, limit, seconds)

    def _train(self, seed: int, clip: float | Rule) -> tuple[Run, float]:
        if (seed, clip) not in self._trained:
            begun = time.perf_counter()
            run = train(self._task, seed, clip)
            self._trained[seed, clip] = run, time.perf_counter() - begun
        return self._trained[seed, clip]


def _key(outcome: Outcome) -> float:
    return outcome.loss if math.isfinite(outcome.loss) else math.inf


def outcomes_of(name: str, seeds: Sequence[int]) -> dict[str, list[tuple[Outcome, float]]]:
    """By advice, the outcomes of a task for each seed, and the losses before the first step.

    Runs on one thread: more only slow down matrices as small as these, and change sums.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        outcomes = Outcomes(TASKS[name], Path(folder))
        untrained = [outcomes.untrained(seed) for seed in seeds]
        return {
            advice: [(outcomes.of(advice, s), u) for s, u in zip(seeds, untrained, strict=True)]
            for advice in ADVICE
        }
