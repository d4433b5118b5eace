"""Points of a sweep side by side: read, grouped over seeds, ranked at the same budget, drawn."""
