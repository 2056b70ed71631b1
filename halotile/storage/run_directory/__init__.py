"""The run directory beside an output: journal, checkpoints, locks and status."""
