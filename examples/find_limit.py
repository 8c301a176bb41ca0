"""Find the limit of a recurrent network by trying, and train with it.

The network of train_rnn.py reads handwritten digits, here with a smaller recurrent matrix and in
120 steps. `find_max_norm` tries limits in shorter trainings. Then the network is trained without
clipping and with the limit that was found, from three seeds that the search has not seen, and reads
digits that no training has seen.

Run it with ``make demo``, or after ``pip install ".[examples]"`` with
``python -m examples.find_limit``.
"""

import math

import torch

import tritonclip
from examples.train_rnn import QUICK, PixelReader, load_sequences, train
from tritonclip.finder import Found

SEARCH_STEPS, SEARCH_SEEDS, SEEDS = 60, (10, 11, 12), (0, 1, 2)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a new network and its optimizer."""
    model = PixelReader(QUICK.recurrent_gain)
    return model, torch.optim.SGD(model.parameters(), QUICK.learning_rate, momentum=0.9)


def find(data: list[torch.Tensor]) -> Found:
    """Search for the limit on the training digits."""
    images, _, labels, _ = data
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(len(images), (64,), generator=generator) for _ in range(SEARCH_STEPS)]

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])

    return tritonclip.find_max_norm(
        make, batches, loss=loss, steps=SEARCH_STEPS, seeds=SEARCH_SEEDS
    )


def conclusion(limit: float | None, shares: dict[str, list[float]]) -> str:
    """Say in a sentence what came of the limit, as ranges over seeds."""
    ranges = [f"{min(own):.0%} to {max(own):.0%} {name}" for name, own in shares.items()]
    return (
        f"The limit that was found for a shorter training of it is {limit}. Over {len(SEEDS)} "
        f"other seeds it reads {' and '.join(ranges)}."
    )


def main() -> str:
    """Search, train and report; return the conclusion."""
    # Threads only slow down matrices as small as these.
    torch.set_num_threads(1)
    data = load_sequences(torch.device("cpu"))
    found = find(data)
    print(found)
    shares = {}
    for name, limit in (("without clipping", math.inf), ("with it", found.max_norm or math.inf)):
        rule = tritonclip.ClipByGlobalNorm(limit)
        each = (train(rule, data, QUICK, lambda: None, seed) for seed in SEEDS)
        shares[name] = [run.accuracy for run in each]
    print(text := conclusion(found.max_norm, shares))
    return text


if __name__ == "__main__":
    main()
