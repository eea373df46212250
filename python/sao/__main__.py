"""`python -m sao` is `sao`."""

from sao.cli import main

main()
