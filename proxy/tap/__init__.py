"""Prepares requests, reads answers along, hides what we added, rebuilds token strings, keeps evidence."""

from proxy.tap.factory import open_foreign_tap, open_tap
from proxy.tap.prepare import prepare
from proxy.tap.tokens import TokenStrings

__all__ = ["TokenStrings", "open_foreign_tap", "open_tap", "prepare"]
