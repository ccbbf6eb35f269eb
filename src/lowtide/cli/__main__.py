"""``python -m lowtide.cli``: the command where no script of that name is installed."""

from __future__ import annotations

from lowtide.cli import main

if __name__ == "__main__":
    main()
