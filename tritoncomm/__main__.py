"""`python -m tritoncomm` is the command `tritoncomm`."""

from tritoncomm.cli import main

if __name__ == "__main__":
    main()
