"""From bytes on the wire to images, and from probabilities to replies: MLflow's scoring protocol and Open Inference v2."""
