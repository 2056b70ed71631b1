"""The commands of ``recon-cli``: each parses its arguments, calls one function, and prints the result."""
