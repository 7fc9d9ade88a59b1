"""Links of the control plane: bytes of the messages, one link per follower, bootstrap over a store.

``codec``, ``link`` and ``memory`` need only the standard library; ``gloo`` and ``store`` need torch.
"""
