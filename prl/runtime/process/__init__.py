"""One process and its life: what it starts with, what it does to itself, how it is seen, why it failed, who ends it."""
