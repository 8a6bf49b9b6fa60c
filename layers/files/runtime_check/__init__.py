"""The parts of ``check_runtime.py``. Standard library only, Python 3.10 or later."""
