"""``python -m mfsdp_cli`` is the ``mfsdp`` command."""

from mfsdp_cli.cli import main

if __name__ == "__main__":
    main()
