"""The commands of ``recon-cli``. Each parses its arguments, calls one function of another package, and prints
the result."""
