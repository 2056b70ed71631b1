"""Paths and durable writes on the local disk. No array is known here."""
