"""Find the limit of a recurrent network by trying, and train with it.

The network of train_rnn.py reads handwritten digits, here with a smaller recurrent matrix and in
120 steps. `find_max_norm` tries limits in shorter trainings. Then the network trains without
clipping and with the limit that was found, from three seeds that the search has not seen, and is
tested on digits that no training has seen.

Run it with ``make demo``, or after ``pip install ".[examples]"`` with
``python -m examples.find_limit``. ``--full`` trains the network of train_rnn.py for 2,000 steps,
and ``--steps 300`` sets the length of the trials of the search.
"""

import argparse
import math
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

import tritonclip
from examples.train_rnn import QUICK, PixelReader, Settings, load_sequences, train
from tritonclip.advice.finder import Found

SEARCH_STEPS, SEARCH_SEEDS, SEEDS = 60, (10, 11, 12), (0, 1, 2)


def find(data: list[torch.Tensor], settings: Settings, steps: int) -> Found:
    """Search for the limit on the training digits."""
    images, _, labels, _ = data

    def training(clip: Callable[..., Any]) -> Generator[torch.Tensor, None, None]:
        model = PixelReader(settings.recurrent_gain)
        optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate, momentum=0.9)
        while True:
            batch = torch.randint(len(images), (64,))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            clip(model.parameters())
            optimizer.step()
            yield loss

    return tritonclip.find_max_norm(training, steps=steps, seeds=SEARCH_SEEDS)


def conclusion(limit: float | None, shares: dict[str, list[float]]) -> str:
    """Say in two sentences what limit was found, and how accuracies range over seeds."""
    ranges = [f"{min(own):.0%} to {max(own):.0%} {name}" for name, own in shares.items()]
    return (
        f"The limit that was found for a shorter training of it is {limit}. Over {len(SEEDS)} "
        f"other seeds it reads {' and '.join(ranges)}."
    )


def main(arguments: Sequence[str] = ()) -> str:
    """Search, train and report; return the conclusion."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="the network of train_rnn.py")
    parser.add_argument("--steps", type=int, default=SEARCH_STEPS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    settings = Settings() if options.full else QUICK
    # Threads only slow down matrices as small as these.
    torch.set_num_threads(1)
    data = load_sequences(torch.device("cpu"))
    found = find(data, settings, options.steps)
    print(found)
    shares = {}
    for name, limit in (("without clipping", math.inf), ("with it", found.max_norm or math.inf)):
        rule = tritonclip.ClipByGlobalNorm(limit)
        each = (train(rule, data, settings, lambda: None, seed) for seed in SEEDS)
        shares[name] = [run.accuracy for run in each]
    print(text := conclusion(found.max_norm, shares))
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
