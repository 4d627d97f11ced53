"""One rank, from rendezvous to the verified model: its stages, and the session of a process around them.

``python -m manyhands.worker`` starts it, under any launcher.
"""
