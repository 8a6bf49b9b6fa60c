"""Static readiness: does a tree of files fit a GPU node? Answered from bytes alone, on a CPU.

``facts`` reads one file, ``tree`` lays layers over each other, the other modules each judge one thing and give rows,
``judge`` runs them all.
"""
