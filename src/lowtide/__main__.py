"""``python -m lowtide``: the command, for the Python that runs it."""

from __future__ import annotations

from lowtide.cli import main

if __name__ == "__main__":
    main()
