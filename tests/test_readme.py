"""The Python of the README runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def _names() -> dict[str, Any]:
    """What the README takes as given: a model with gradients, its optimizer and loss, a GAN."""
    model = torch.nn.Linear(3, 2)
    loss = model(torch.ones(3)).square().sum()
    parts = {name: torch.nn.Linear(3, 2) for name in ("body", "head", "embedding")}
    return {
        "torch": torch,
        "model": model,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "generator": torch.nn.Linear(3, 2),
        "critic": SimpleNamespace(**parts),
    }


def test_code_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == README.read_text().count("```python")
    names = _names()
    for block in blocks:
        exec(block, names)

    assert "'clipped_share'" in capsys.readouterr().out
    critic = names["critic"]
    for part in vars(critic).values():
        part.weight.grad, part.bias.grad = torch.full((2, 3), 9.0), torch.full((2,), 9.0)
    names["critic_optimizer"].step()
    norms = [float(part.weight.grad.norm()) for part in vars(critic).values()]
    torch.testing.assert_close(norms, [1.0, 0.5, 9.0 * 6**0.5], rtol=1e-5, atol=0)
    assert critic.body.bias.grad.tolist() == [9.0, 9.0]
