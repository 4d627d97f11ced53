"""``python -m manyhands.demo [section.key=value ...]``: the demo run, on all GPUs or on two CPU processes."""

from __future__ import annotations

import sys

from manyhands.cli.main import main
from manyhands.demo import demo_words

if __name__ == "__main__":
    sys.argv[1:] = ["train", *demo_words(), *sys.argv[1:]]
    main()
