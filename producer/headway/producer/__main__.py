"""`python -m headway.producer` is `headway`."""

from headway.producer.cli import main

if __name__ == "__main__":
    main(prog_name="headway")
