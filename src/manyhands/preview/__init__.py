"""What a run's rows look like to the model: collected once, shown as text or as a page. Knows no torch, trains
nothing.
"""
