"""Take a batch apart into examples, and put the same examples together in other arrangements.

An arrangement says which microbatch has which examples, how they are padded or packed, and which rank gets them. A correct
training step computes the same gradients for every arrangement.
"""
