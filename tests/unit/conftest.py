"""tests/test_bare.py runs what is here, by unittest and under interpreters that have nothing installed."""

collect_ignore_glob = ["test_*.py"]
