"""The Python environments: build, relocate, inventory, overlay, static readiness."""
