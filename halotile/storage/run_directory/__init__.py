"""The directory beside an output: journal, checkpoints, locks, status. No pixels."""
