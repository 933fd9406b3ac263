"""`python -m springtide`."""

from springtide.cli.main import main

main()
