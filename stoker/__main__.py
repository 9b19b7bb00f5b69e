"""`python -m stoker` is the `stoker` command."""

from stoker.cli.main import main

main()
