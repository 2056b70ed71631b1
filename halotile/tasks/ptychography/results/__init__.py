"""Results of a reconstruction: its file, its drawing and its resolution. No steps."""
