"""Gradients that lie over several processes, in three ideas.

domain       the processes that share a norm: `process_groups`
shard        what lies here of a gradient: `shards`
reduction    makes one norm of those of all shards: `reduction`
"""
