"""How long a step takes at a size that nobody here can run: a time model over cards, plans and measured rates."""
