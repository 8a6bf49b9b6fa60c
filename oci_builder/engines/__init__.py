"""Where a stage runs: on this machine, or on Modal."""
