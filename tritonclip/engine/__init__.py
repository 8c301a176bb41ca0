"""One call: collect gradients, find or build their plan, execute."""
