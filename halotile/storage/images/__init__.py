"""Images for people: planes, PNG, TIFF. Nothing here is read back by a run."""
