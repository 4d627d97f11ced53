"""One rank, from joining the world to the verified model. ``python -m manyhands.worker`` starts it, under any
launcher.
"""
