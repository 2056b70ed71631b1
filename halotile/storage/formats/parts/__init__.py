"""Parts of the readers: checks of files, physical sizes, channels. Formats are the modules one folder up."""
