"""Gradients that lie over several processes, in three ideas.

domain       the processes that share a norm
shard        what lies here of a gradient
reduction    makes one norm of the norms of all shards
"""
