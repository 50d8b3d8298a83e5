"""Which model is served: found in the registry, loaded beside, verified, swapped, let go."""
