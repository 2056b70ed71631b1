"""Who asks: the command line, its configuration, its words. The only room that knows typer and pydantic."""
