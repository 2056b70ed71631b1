"""Output of commands: rows, tables and progress. Nothing is decided in this package."""
