"""Speed and memory of this machine on random weights of published shapes, through the product's own path.

Speed and memory do not depend on the values of weights. Nothing else imports this package; ``manyhands bench``
starts it as a process. The comparison with other libraries is not part of the package: ``python -m benchmarks`` in a
checkout.
"""
