"""``python -m eplb_core.cli``: the same as ``eplb``, where scripts are not on the path."""

from eplb_core.cli import main

main()
