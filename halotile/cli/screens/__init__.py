"""What commands print: rows, tables and progress. Nothing here decides."""
