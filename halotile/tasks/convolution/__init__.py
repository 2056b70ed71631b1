"""Convolutions and filters whose bits do not depend on the tile."""
