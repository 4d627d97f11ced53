"""``python -m manyhands``: the command line."""

from __future__ import annotations

from manyhands.cli.main import main

if __name__ == "__main__":
    main()
