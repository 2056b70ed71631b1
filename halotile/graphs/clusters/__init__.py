"""The kinds of clusters, a file for each."""
