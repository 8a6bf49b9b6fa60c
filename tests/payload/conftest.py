"""What tests of git and of uv share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def nobodys_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git's global settings, for a test to fill."""
    settings = tmp_path / "gitconfig"
    settings.touch()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    return settings
