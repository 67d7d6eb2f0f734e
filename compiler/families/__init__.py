"""What an architecture fixes, and which tensors a model of it has.

In: a configuration, and a checkpoint's tensors by their names. Out: families of decoders and of
encoders, the parts that few of them have (ropes, experts, states, latent attention), and which
tensors each packed weight is made of.
"""
