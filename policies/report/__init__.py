"""An evidence bundle as one HTML page: self-contained, printable, without scripts."""

from __future__ import annotations

from policies.report.page import page
from policies.report.style import CSP

__all__ = ["CSP", "page"]
