"""`python -m countersign`."""

from __future__ import annotations

from countersign import main

if __name__ == "__main__":
    raise SystemExit(main())
