"""The 65 fidelity cases against this proxy and other gateways, each from its own environment."""
