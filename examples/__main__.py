"""Run all examples and print what they have shown: `make demo`, or `python -m examples`."""

import sys
from pathlib import Path

from examples import find_limit, train_rnn, train_transformer


def main() -> None:
    """Train, then print the results, the paths of the figures and the next command."""
    digits, text, found = train_rnn.main([]), train_transformer.main([]), find_limit.main()
    figures = [module.parse([])[1] for module in (train_rnn, train_transformer)]
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    print(
        f"\n{train_rnn.conclusion(digits)}\n{train_transformer.conclusion(text)}\n{found}\n\n"
        f"Figures: {figures[0]}, {figures[1]}\n"
        f"Next, for a limit from recorded norms: {python} -m tritonclip suggest "
        f"{figures[1].with_suffix('.csv')}"
    )


if __name__ == "__main__":
    main()
