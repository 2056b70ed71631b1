"""Distributed stacks of operators and their data fidelities."""
