"""Why a run failed or hangs: the first cause, stacks, collectives."""
