"""The folder of a run: what is prepared in it, who holds it, what a second launch may resume."""
