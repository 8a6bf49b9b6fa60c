"""``cache show`` and ``cache prune``: what a cache holds, and which of it goes.

A prune decides by what it measured, then takes the lock that builds share, looks again, and moves what nobody has used
since aside; a build that starts meanwhile waits for that moment only, and the disk is freed after it. What a killed
prune moved aside goes with the next one.
"""

from oci_builder.cache.contents import Contents, show_cache
from oci_builder.cache.removal import DAY, Pruned, PruneOptions, prune_cache

__all__ = ["DAY", "Contents", "PruneOptions", "Pruned", "prune_cache", "show_cache"]
