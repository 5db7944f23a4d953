"""``python -m autopar``: the command line."""

from autopar.cli import main

main()
