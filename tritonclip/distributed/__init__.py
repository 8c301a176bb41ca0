"""Gradients that lie over several processes: who holds which piece, and the norm of all pieces."""
