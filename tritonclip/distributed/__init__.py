"""Gradients that lie over several processes: who holds which shard, and the norm of all shards."""
