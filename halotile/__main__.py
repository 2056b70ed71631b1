"""``python -m halotile`` is ``recon-cli``."""

from halotile.cli.main import main

if __name__ == "__main__":
    main()
