"""What several operators are made of. No operator of its own is here."""
