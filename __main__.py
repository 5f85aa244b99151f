"""`python -m magnetar …` is `magnetar …`."""

from .cli.main import main

main()
