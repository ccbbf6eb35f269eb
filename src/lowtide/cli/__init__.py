"""The ``lowtide`` command."""

from __future__ import annotations

from lowtide.cli._app import app, main

__all__ = ["app", "main"]
